"""
Layout of a packed block: 64 tokens of one KV head, quantized to 8, 4 or 2 bits.

A code u stands for `minimum + scale * u`. Minimum and scale are constant over a group of lanes, and differ along the
axis that a product sums over: keys have them per channel for a group of tokens, values per token for a group of
channels (KIVI, arXiv:2402.02750). So they fold into the query, or into the weights, before the product.

A packed block is three arrays, with `inner` the axis that is summed over and `lanes` the other one:
    words  uint32 `[inner * bits / 32, lanes]`
    scales bfloat16 `[groups, inner]`
    minima bfloat16 `[groups, inner]`
The two halves of a word hold codes of indices that are 8 apart: where the low half has index `16 c + p`, the high half
has `16 c + 8 + p`, p < 8. A mask and a shift then give pairs of 16-bit numbers, as the processor's dot products take.
"""

from functools import cache
from typing import NamedTuple

from ..blocks import BLOCK
from ..vector.rotation import rotation_size

CHUNK = 16
BITS = (8, 4, 2)


class PackedLayout(NamedTuple):
    """
    Layout of the packed blocks of a layer's keys, or of its values.

    It is a tuple, because kernels of a layer take two for each token.

    Attributes:
        bits: of a code.
        inner: length of the axis that is summed over, padded to a multiple of 16.
        lanes: length of the other axis, padded to a multiple of 16.
        group: lanes that share a scale.
        dim: width of a key or value, without padding.
        transposed: whether tokens are the lanes, as for keys.
        rotation: channels that are rotated together before quantization, see `vector.rotation`; 1 for none.
    """

    bits: int
    inner: int
    lanes: int
    group: int
    dim: int
    transposed: bool
    rotation: int

    @classmethod
    @cache
    def of_keys(cls, bits: int, key_dim: int, group: int, is_rotated: bool) -> "PackedLayout":
        rotation = rotation_size(key_dim) if is_rotated else 1
        return cls(bits, _filled(key_dim), BLOCK, min(group, BLOCK), key_dim, True, rotation)

    @classmethod
    @cache
    def of_values(cls, bits: int, value_dim: int, group: int, is_rotated: bool) -> "PackedLayout":
        width, rotation = _filled(value_dim), rotation_size(value_dim) if is_rotated else 1
        return cls(bits, BLOCK, width, min(group, width), value_dim, False, rotation)

    @property
    def words(self) -> int:
        """Rows of words."""
        return self.inner * self.bits // 32

    @property
    def groups(self) -> int:
        return -(-self.lanes // self.group)

    @property
    def num_bytes(self) -> int:
        """Bytes of a packed block, a multiple of 64, because inner and lanes are multiples of 16."""
        return 4 * (self.words * self.lanes + self.groups * self.inner)


def _filled(dim: int) -> int:
    return -(-dim // CHUNK) * CHUNK
