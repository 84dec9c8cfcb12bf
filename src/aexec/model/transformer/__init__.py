"""The real runner: a ``transformers`` model under torch, over a paged KV cache of our own."""
