"""One rank's model: the torch runner and the dummy, the sampler, the loader and the KV cache."""
