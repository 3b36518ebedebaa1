"""The record of a layer's keys and values in host memory, which the kernels of attention read."""

from typing import NamedTuple

import numpy as np

from ..forms.blocks import PackedLayout, value_width
from ..vector.vector_ir import BLOCK
from .attention import division
from .attention_call import KEYS, STORED_BYTES, Stored


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
        hidden: first tokens that no query sees. Column 0 of a mask is the token after them.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(STORED_BYTES // 8, np.int64)
        self.address: int = self._numbers.ctypes.data
        self.place: object = None
        self.element = np.dtype(np.float32)
        self.heads = self.key_dim = self.value_dim = self.quantized_blocks = 0
        self.num_tokens = self.hidden = 0
        self._form: tuple = ()

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
        self.place, self._form = None, ()  # until it is written
        _, self.heads, self.key_dim, _ = keys.shape
        self.element, self.value_dim = keys.dtype, value_dim
        arrays: tuple[np.ndarray | None, ...] = (None,) * 4
        first = self.quantized_blocks = 0
        if quantized is not None:
            first, self.quantized_blocks = quantized.first, quantized.num_blocks
            arrays = quantized.keys, quantized.values, quantized.query_factors, quantized.rotation_matrix
            self._numbers[KEYS // 8 :] = *quantized.key_layout, *quantized.value_layout
            self._form = quantized.first, *quantized[4:]
        packed_keys, packed_values, factors, matrix = (0 if each is None else each.ctypes.data for each in arrays)
        self._numbers[: KEYS // 8] = Stored(
            keys.ctypes.data, values.ctypes.data, keys.strides[1], values.strides[1], packed_keys, packed_values,
            factors, matrix, self.heads, num_kv_heads, self.key_dim, value_width(self.key_dim), value_dim,
            value_width(value_dim), first, self.quantized_blocks, num_tokens=0, hidden=0,
        )  # fmt: skip
        self.place = place

    def count(self, num_tokens: int, hidden: int = 0) -> None:
        """Say how many tokens there are, and how many first ones the query of the first new token does not see."""
        self._numbers[_NUM_TOKENS], self._numbers[_HIDDEN] = num_tokens, hidden
        self.num_tokens, self.hidden = num_tokens, hidden

    def shared_parts(self, other: "StoredBlocks", num_tokens: int) -> int:
        """
        Return how many first parts of the blocks have the same numbers in another record, of those that are most.

        These are parts of quantized blocks, or of blocks in full precision where nothing is quantized. Sequences whose
        first tokens are the same share none where their lengths are divided into parts of another size.

        Args:
            other: of a sequence that begins with the same tokens.
            num_tokens: how many these are.
        """
        forms_are_equal = len(self._form) == len(other._form) and all(map(np.array_equal, self._form, other._form))
        if self.hidden or other.hidden or not forms_are_equal:
            return 0
        first = self._form[0] if self._form else 0
        blocks = [each.quantized_blocks if self._form else each.blocks_seen for each in (self, other)]
        (size, whole, _), (other_size, other_whole, _) = map(division.py_func, blocks)
        parts = min((num_tokens // BLOCK - first) // size, whole, other_whole)
        return max(0, parts) if size == other_size else 0

    @property
    def blocks_seen(self) -> int:
        """Number of blocks that queries see, quantized or not."""
        return -(-self.num_tokens // BLOCK) - self.hidden // BLOCK


_NUM_TOKENS, _HIDDEN = (Stored._fields.index(name) for name in ("num_tokens", "hidden"))
