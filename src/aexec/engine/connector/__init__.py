"""The scheduler side of a KV connector: what is kept outside of the cache, and what of it comes back."""
