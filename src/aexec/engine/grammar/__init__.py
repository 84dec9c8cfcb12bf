"""Structured output: grammars, the libraries that know them, and the bitmask of a step.

``manager`` is what the driver uses. A grammar is compiled off the loop and, first, in a
process of its own (``compiler``, ``workshop``), since no library's compiler can be stopped from
outside, and some crash on hostile input; each library is a module behind the protocols of ``base``.
"""
