"""How many tokens of a prompt a forward pass reads, known without importing anything."""

# Long enough for the weights' products, and short enough for the activations of a chunk to be little beside a cache.
PREFILL_CHUNK_SIZE = 2048
