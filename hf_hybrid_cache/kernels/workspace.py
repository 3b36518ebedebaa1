"""Attention of a few queries: shapes, memory that calls use again, and calls of the kernels."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .attention.attention import Call, attend
from .attention.page_tiles import PAGE
from .attention.quantized_attention import QuantizedCall, attend_quantized
from .attention.quantized_slots import LANE_NUMBERS, ROW_NUMBERS, SLOT_NUMBERS
from .blocks import BLOCK, value_width
from .integer_kernels import uses_integer_kernels
from .quantized.folding import SLOTS
from .quantized.quantized_blocks import PackedLayout
from .selection.page_workspace import IndexedBlocks, PageWorkspace
from .selection.selected_attention import attend_selected
from .selection.selected_quantized_attention import attend_selected_quantized
from .vector.parallel import team_of_kernels
from .vector.processor import has_bfloat16_products
from .vector.tiles import ROWS
from .vector.vector_ir import CACHE_LINE, LANES

# float32 sums over more blocks would lose digits; the sums of segments are added in float64.
_SEGMENT_BLOCKS = 64
# A call has the fewest segments times a power of two, which most numbers of threads share equally.
_FEWEST_SEGMENTS, _MOST_SEGMENTS = 12, 96
_WORTH_A_SEGMENT = 32  # blocks; with fewer, starting the segment and merging its result would take time beside them
_NO_FACTORS, _NO_ROTATION = np.empty((0, 0), np.float32), np.empty((1, 0, 0), np.float32)
_NO_PAIRS = np.empty((0, 0, 0), np.uint16)
_NOT_GIVEN = {dtype: np.empty((0, 0, 0, 0), dtype) for dtype in (np.uint8, np.float32)}


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros from the start of a cache line on. A vector across two lines takes twice as long to load and to store."""
    count = math.prod(shape)
    numbers = np.zeros(count + CACHE_LINE // np.dtype(dtype).itemsize, dtype)
    skipped = -numbers.ctypes.data % CACHE_LINE // numbers.itemsize
    return numbers[skipped : skipped + count].reshape(shape)


class Shape(NamedTuple):
    """
    Shape of a call of attention.

    It is a tuple, because one is made and looked up for each layer and token.

    Attributes:
        batch: number of sequences.
        num_kv_heads: KV heads of each sequence.
        group: query heads that share a KV head.
        query_length: queries of each head.
        key_dim: width of a key.
        value_dim: width of a value.
    """

    batch: int
    num_kv_heads: int
    group: int
    query_length: int
    key_dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        """KV heads of all sequences."""
        return self.batch * self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows that share a KV head; row `g * query_length + i` is query `i` of the group's query head `g`."""
        return self.group * self.query_length


class Query(NamedTuple):
    """
    The query of a call, `[batch, query heads, query_length, key_dim]` in memory, the last axis contiguous.

    Attributes:
        address: of the first number.
        strides: numbers from a sequence, a head and a query to the next one.
        is_bfloat16: whether it is bfloat16, not float32.
    """

    address: int
    strides: tuple[int, int, int]
    is_bfloat16: bool


class QuantizedBlocks(NamedTuple):
    """
    The quantized blocks of a layer.

    It is a tuple, because one is made for each layer and token.

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


@dataclass
class Workspace:
    """
    Memory that calls of one shape use again.

    Attributes:
        shape: of the calls.
        out: float32 `[heads, padded rows, padded value_dim]`: softmax(scale * query @ keys.T + mask) @ values; zeros
            for a query that sees no token.
        lse: float32 `[heads, padded rows]`: natural log of the sum of exp(score) over the tokens that are read; minus
            infinity for a query that sees no token.
        tokens_read: number of tokens of indexed blocks that the last call has read, summed over KV heads.
    """

    shape: Shape
    out: np.ndarray = field(init=False)
    lse: np.ndarray = field(init=False)
    tokens_read: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        shape = self.shape
        rows = -(-shape.rows // ROWS) * ROWS
        # The padding of a query stays zero.
        self.query = aligned_zeros((shape.heads, rows, value_width(shape.key_dim)), np.float32)
        self.pairs = aligned_zeros(self.query.shape, np.uint16)
        self.rotated = aligned_zeros(self.query.shape, np.float32)
        self.out = aligned_zeros((shape.heads, rows, value_width(shape.value_dim)), np.float32)
        self.lse = aligned_zeros((shape.heads, rows), np.float32)
        self._pages: PageWorkspace | None = None
        self._make_partial(0)

    def _make_partial(self, segments: int) -> None:
        heads, rows, width = self.out.shape
        self.scores = aligned_zeros((segments, SLOTS, ROWS, BLOCK), np.float32)
        self.corrections = aligned_zeros((segments, SLOTS, ROWS), np.float32)
        self.maxima = aligned_zeros((segments, heads, rows), np.float32)
        self.sums = aligned_zeros((segments, heads, rows), np.float32)
        self.partial = aligned_zeros((segments, heads, rows, width), np.float32)
        self.operands = aligned_zeros((segments, 2, SLOTS, ROWS, max(self.query.shape[2], BLOCK)), np.float32)
        self.row_numbers = aligned_zeros((segments, ROW_NUMBERS, SLOTS, ROWS), np.float32)
        self.lane_numbers = aligned_zeros((segments, LANE_NUMBERS, SLOTS, ROWS, LANES), np.float32)
        self.slots = aligned_zeros((segments, SLOTS, SLOT_NUMBERS), np.int64)

    def attend(
        self,
        query: Query,
        keys: np.ndarray,
        values: np.ndarray,
        num_tokens: int,
        scale: float,
        visible: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        quantized: QuantizedBlocks | None = None,
        indexed: IndexedBlocks | None = None,
        top_p: float = 1.0,
        most: float = 1.0,
        written: int = 0,
    ) -> None:
        """
        Attend to the first `num_tokens` tokens; the result is in `out` and `lse`.

        Args:
            query: after rotary embedding.
            keys: `[blocks, heads, key_dim, 64]`, see `kernels.blocks`; float32, uint16 (bfloat16 bits) or int16 (half
                precision bits).
            values: `[blocks, heads, 64, padded value_dim]`, of the same type; the padding is zero.
            num_tokens: at least 1.
            scale: of the scores.
            visible: uint8 `[batch, query heads, query_length, tokens]`, 0 for a token that a query does not see. Any of
                the first three sizes may be 1, for all.
            bias: float32, shaped as `visible` may be, added to the scaled scores.
            quantized: blocks that are not in `keys` and `values`, which hold the blocks before and after them without a
                gap.
            indexed: blocks of which the call may read a part: a run of those in full precision, or all quantized ones;
                `None` for none.
            top_p: the call reads the fewest pages of 16 tokens of the indexed blocks that, together with all other
                blocks, carry this share of the attention of a KV head's queries, on average over the queries.
            most: share of the indexed pages; if more pages are needed, the call reads all.
            written: address of contiguous `[batch, query heads, query_length, value_dim]` of the query's type, to which
                the output is also written; 0 for none.
        """
        shape = self.shape
        # Pages are rated for a positive scale: a negative one would reverse the order of the scores.
        parts = indexed if indexed is not None and scale > 0 else None
        set_apart = parts or quantized
        apart = 0 if set_apart is None else set_apart.num_blocks
        segments_apart = self._segments(apart) if apart else 0
        segments = segments_apart + self._segments(-(-num_tokens // BLOCK) - apart)
        if segments != len(self.maxima):
            self._make_partial(segments)
        sequence_stride, head_stride, query_stride = query.strides
        call = Call(
            given=query.address,
            sequence_stride=sequence_stride,
            head_stride=head_stride,
            query_stride=query_stride,
            is_bfloat16=query.is_bfloat16,
            written=written,
            value_dim=shape.value_dim,
            query=self.query,
            pairs=self.pairs if query.is_bfloat16 and _multiplies_pairs(keys) else _NO_PAIRS,
            keys=keys,
            values=values,
            num_tokens=num_tokens,
            num_kv_heads=shape.num_kv_heads,
            group=shape.group,
            query_length=shape.query_length,
            scale=scale,
            visible=_NOT_GIVEN[np.uint8] if visible is None else visible,
            bias=_NOT_GIVEN[np.float32] if bias is None else bias,
            scores=self.scores,
            corrections=self.corrections,
            maxima=self.maxima,
            sums=self.sums,
            partial=self.partial,
            out=self.out,
            lse=self.lse,
        )
        of_codes = None if quantized is None else self._quantized_call(call, quantized, segments_apart)
        if parts is not None:
            self._pages = self._pages or PageWorkspace(shape.heads, self.query.shape[1], shape.key_dim)
            selected = self._pages.call(call if of_codes is None else of_codes, parts, segments_apart, top_p, most)
            (attend_selected if of_codes is None else attend_selected_quantized)(team_of_kernels().address, selected)
            self.tokens_read = self._pages.pages_read * PAGE
            return
        if of_codes is None:
            attend(team_of_kernels().address, call)
        else:
            attend_quantized(team_of_kernels().address, of_codes)
        self.tokens_read = 0 if indexed is None else indexed.num_blocks * shape.heads * BLOCK

    def _segments(self, blocks: int) -> int:
        """Number of segments for some blocks of all heads. The threads do not count, so the order of sums is fixed."""
        segments = _FEWEST_SEGMENTS
        while segments < _MOST_SEGMENTS and 2 * segments * _WORTH_A_SEGMENT <= blocks:
            segments *= 2
        return min(blocks * self.shape.heads, segments * -(-blocks // (segments * _SEGMENT_BLOCKS)))

    def _quantized_call(self, call: Any, quantized: QuantizedBlocks, quantized_segments: int) -> Any:
        """`call` with the fields of a `QuantizedCall`."""
        keys, values = quantized.key_layout, quantized.value_layout
        return QuantizedCall(
            *call,  # its fields come first
            packed_keys=quantized.keys,
            packed_values=quantized.values,
            first_quantized=quantized.first,
            quantized_blocks=quantized.num_blocks,
            key_bits=keys.bits,
            value_bits=values.bits,
            key_group=keys.group,
            value_group=values.group,
            is_integer=uses_integer_kernels(),
            key_dim=keys.dim,
            key_rotation=keys.rotation,
            value_rotation=values.rotation,
            query_factors=_NO_FACTORS if quantized.query_factors is None else quantized.query_factors,
            rotation_matrix=_NO_ROTATION if quantized.rotation_matrix is None else quantized.rotation_matrix,
            quantized_segments=quantized_segments,
            rotated=self.rotated,
            operands=self.operands,
            row_numbers=self.row_numbers,
            lane_numbers=self.lane_numbers,
            slots=self.slots,
        )


def _multiplies_pairs(keys: np.ndarray) -> bool:
    """Whether keys are multiplied with a query in bfloat16, both as they are."""
    return keys.dtype == np.uint16 and keys.shape[2] % 2 == 0 and has_bfloat16_products()
