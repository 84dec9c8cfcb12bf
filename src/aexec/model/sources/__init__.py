"""Where model files come from, and what is in them."""
