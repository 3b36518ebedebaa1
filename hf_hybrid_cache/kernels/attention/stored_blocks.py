"""The record of a layer's keys and values in host memory, which the kernels of attention read."""

from functools import cache
from typing import NamedTuple

import numpy as np

from ..forms.blocks import PackedLayout, value_width
from ..vector.code_tiles import MOST_BITS_OF_QUADS
from .attention_call import KEYS, STORED_BYTES, Form, Stored


class QuantizedBlocks(NamedTuple):
    """
    The quantized blocks of a layer.

    Attributes:
        keys: uint8 `[num_blocks or more, heads, bytes]`, packed blocks of `key_layout`.
        values: uint8 `[num_blocks or more, heads, bytes]`, packed blocks of `value_layout`.
        first: number of blocks in full precision before them.
        num_blocks: number of quantized blocks.
        key_layout: layout of the packed blocks of keys.
        value_layout: layout of the packed blocks of values.
        query_factors: float32 `[num_kv_heads, key_dim]`, by which the query's channels are multiplied before rotation:
            the reciprocals of the factors of the keys' channels; `None` for ones.
        rotation_matrix: float32 `[num_kv_heads, value_dim, value_dim]`, by which sums of values, as row vectors, are
            multiplied after they are rotated back; `None` for no such product.
    """

    keys: np.ndarray
    values: np.ndarray
    first: int
    num_blocks: int
    key_layout: PackedLayout
    value_layout: PackedLayout
    query_factors: np.ndarray | None = None
    rotation_matrix: np.ndarray | None = None


class StoredBlocks:
    """
    The record of a layer's keys and values in host memory; their memory is the caller's.

    Who stores them writes it when they are elsewhere or blocks are quantized, and counts tokens last.

    Attributes:
        address: of a `Stored`.
        place: what the caller has written it for last, to be compared.
        element: type of the blocks in full precision.
        heads: KV heads of all sequences.
        key_dim: width of a key.
        value_dim: width of a value.
        quantized_blocks: their number.
        num_tokens: number of tokens, at least 1 in a call.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(STORED_BYTES // 8, np.int64)
        self.address: int = self._numbers.ctypes.data
        self.place: object = None
        self.element = np.dtype(np.float32)
        self.heads = self.key_dim = self.value_dim = self.quantized_blocks = self.num_tokens = 0

    def __deepcopy__(self, memo: dict) -> "StoredBlocks":
        """Return one that is to be written: the copies are elsewhere."""
        return StoredBlocks()

    def write(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        num_kv_heads: int,
        value_dim: int,
        quantized: QuantizedBlocks | None = None,
        place: object = None,
    ) -> None:
        """
        Write where tokens are, and in which form; count them next.

        Args:
            keys: `[blocks, heads, key_dim, 64]`, see `forms.blocks`; float32, uint16 (bfloat16 bits) or int16 (half
                precision bits).
            values: `[blocks, heads, 64, padded value_dim]`, of the same type; the padding is zero.
            num_kv_heads: KV heads of a sequence.
            value_dim: width of a value.
            quantized: blocks that are not in `keys` and `values`, which hold the blocks before and after them without a
                gap.
            place: see `StoredBlocks`.
        """
        self.place = None  # until it is written
        _, self.heads, self.key_dim, _ = keys.shape
        self.element, self.value_dim = keys.dtype, value_dim
        arrays: tuple[np.ndarray | None, ...] = (None,) * 4
        first = self.quantized_blocks = 0
        if quantized is not None:
            first, self.quantized_blocks = quantized.first, quantized.num_blocks
            arrays = quantized.keys, quantized.values, quantized.query_factors, quantized.rotation_matrix
            self._numbers[KEYS // 8 :] = *_form(quantized.key_layout, 127), *_form(quantized.value_layout, 255)
        packed_keys, packed_values, factors, matrix = (0 if each is None else each.ctypes.data for each in arrays)
        self._numbers[: KEYS // 8] = Stored(
            keys.ctypes.data, values.ctypes.data, keys.strides[1], values.strides[1], packed_keys, packed_values,
            factors, matrix, self.heads, num_kv_heads, self.key_dim, value_width(self.key_dim), value_dim,
            value_width(value_dim), first, self.quantized_blocks, num_tokens=0,
        )  # fmt: skip
        self.place = place

    def count(self, num_tokens: int) -> None:
        """Say how many tokens there are."""
        self._numbers[_NUM_TOKENS] = self.num_tokens = num_tokens


_NUM_TOKENS = Stored._fields.index("num_tokens")


@cache
def _form(layout: PackedLayout, byte: int) -> Form:
    """The form of packed blocks; `byte` is the largest integer of 8 bits that folded numbers are rounded to."""
    # Sums of products with codes fit 32 bits.
    of_pairs = min(32767, (2**31 - 1) // ((2**layout.bits - 1) * layout.inner))
    return Form(
        block_bytes=layout.num_bytes,
        bits=layout.bits,
        limit=byte if layout.bits <= MOST_BITS_OF_QUADS else of_pairs,
        inner=layout.inner,
        lanes=layout.lanes,
        group=layout.group,
        groups=layout.groups,
        scales=4 * layout.words * layout.lanes,
        minima=layout.groups * layout.inner * 2,
        rotation=layout.rotation,
    )
