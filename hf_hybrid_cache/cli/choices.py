"""What options can be, known without anything that takes seconds to import."""

from ..models import ALIASES

CACHES = ("stock", "dynamic", "offloaded", "quantized")
BITS = (8, 4, 2)
WEIGHT_BITS = (8, 4)
EXPERTS = ("host",)
DTYPES = ("float32", "bfloat16", "float16")
NAMED_MODELS = tuple(ALIASES)
# Tokens of an answer at most; with --compare every cache writes one.
NEW_TOKENS, COMPARED_TOKENS = 256, 64
DEFAULT_QUESTION = "What is a convenient way to insert debugging assertions into a program?"
RANDOM_TOKENS = 2000
