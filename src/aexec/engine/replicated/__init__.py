"""The engine where every rank has one: all of them decide alike, whatever the timing of their loops."""
