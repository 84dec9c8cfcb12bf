"""A runner without a model: tokens from a hash, for tests and for the benches of all that is around a model."""
