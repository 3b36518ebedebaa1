"""
What a coded block looks like: 64 tokens of one KV head, in 8, 4 or 2 bits, as one record of bytes.

A code u stands for `low + scale * u`. Low and scale are constant over a group along the axis that a product runs
along, and different along the axis that it sums over: keys have them per channel over tokens, values per token over
channels (KIVI, arXiv:2402.02750). So they fold into the query, or the weights, before the product.

A record is three arrays, with `inner` the axis that is summed over and `lanes` the other one:
    words  uint32 `[inner * bits / 32, lanes]`
    scales bfloat16 `[groups, inner]`
    lows   bfloat16 `[groups, inner]`
The two halves of a word hold codes of indices that are 8 apart: where the low half has index `16 c + p`, the high half
has `16 c + 8 + p`, p < 8. A mask and a shift then give pairs of 16-bit numbers, as dot products of processors take.
"""

from typing import NamedTuple

from .blocks import BLOCK
from .rotation import rotation_size

CHUNK = 16
BITS = (8, 4, 2)


class RecordLayout(NamedTuple):
    """
    Of the records of a layer's keys, or of its values.

    A tuple, because two are made for every layer of every token.

    Attributes:
        bits: of a code.
        inner: length of the axis that is summed over, filled up to a multiple of 16.
        lanes: length of the other axis, likewise.
        group: lanes that share a scale.
        dim: of a key or value, as it is given.
        transposed: tokens are the lanes, as for keys.
        rotation: numbers of a key or value that were rotated together before, see `rotation`; 1 for none.
    """

    bits: int
    inner: int
    lanes: int
    group: int
    dim: int
    transposed: bool
    rotation: int

    @classmethod
    def of_keys(cls, bits: int, key_dim: int, group: int, is_rotated: bool) -> "RecordLayout":
        rotation = rotation_size(key_dim) if is_rotated else 1
        return cls(bits, _filled(key_dim), BLOCK, min(group, BLOCK), key_dim, True, rotation)

    @classmethod
    def of_values(cls, bits: int, value_dim: int, group: int, is_rotated: bool) -> "RecordLayout":
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
        """A multiple of 64, because inner and lanes are multiples of 16."""
        return 4 * (self.words * self.lanes + self.groups * self.inner)


def _filled(dim: int) -> int:
    return -(-dim // CHUNK) * CHUNK
