"""From logits to tokens: masks, penalties, cut-offs, and a draw that depends on seed and position alone."""
