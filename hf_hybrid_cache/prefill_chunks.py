"""Numbers of prompt tokens in a forward pass; this module imports nothing."""

# Long enough for the weights' products, and short enough for the activations of a chunk to be little beside a cache.
PREFILL_CHUNK_SIZE = 2048

# With fewer tokens a pass may take kernels for few rows, which round in another way: attention up to 64 tokens, for any
# number of heads, products with quantized weights up to 32. torch's own products need some margin.
FEWEST_TOKENS_OF_SAME_BITS = 128
