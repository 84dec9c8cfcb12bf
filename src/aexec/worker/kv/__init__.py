"""The worker side of a KV connector: copies blocks out of one rank's cache, keeps them, brings them back."""
