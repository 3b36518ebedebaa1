"""
Blocks: keys and values of 64 tokens, as the kernels read them.

Keys of one head and one block are `[head_dim, 64]`, transposed; values are `[64, value_width]`. Both products of
attention then run along contiguous memory, times one number of the query or one weight. Blocks follow each other as
`[blocks, heads, ...]`, so that any run of blocks is one piece of memory, whatever the number of heads.
"""

BLOCK = 64
_LANES = 16


def value_width(value_dim: int) -> int:
    """Numbers in a stored row of values: `value_dim`, padded to whole vectors of sixteen."""
    return -(-value_dim // _LANES) * _LANES
