"""Numbers of prompt tokens in a forward pass; this module imports nothing."""

# Long enough for the weights' products, and short enough for the activations of a chunk to be little beside a cache.
PREFILL_CHUNK_SIZE = 2048
