"""
What the kernels read: keys and values in blocks of 64 tokens.

Keys of one head and one block are `[head_dim, 64]`, transposed; values are `[64, value_width]`. Both products of
attention then run along contiguous memory with the query, or the weight, as one broadcast number. Blocks follow each
other as `[blocks, heads, ...]`, so that any run of tokens is one piece of memory, whatever the number of heads.
"""

BLOCK = 64
_LANES = 16


def value_width(value_dim: int) -> int:
    """Floats in one stored row of values: `value_dim`, filled up to whole vectors of sixteen."""
    return -(-value_dim // _LANES) * _LANES
