"""The values and defaults of options, known without importing torch or transformers."""

from ..models.shapes import ALIASES

CACHES = ("stock", "dynamic", "offloaded", "quantized")
BITS = (8, 4, 2)
DEFAULT_BITS = 4
WEIGHT_BITS = (8, 4)
EXPERTS = ("host",)
DTYPES = ("float32", "bfloat16", "float16")
NAMED_MODELS = tuple(ALIASES)
# Tokens of an answer at most; with --compare, of the answer of each cache.
NEW_TOKENS, COMPARED_TOKENS = 256, 64
DEFAULT_QUESTION = "What is a convenient way to insert debugging assertions into a program?"
RANDOM_TOKENS = 2000
