"""What a call of the attention kernel works on: shapes, and memory that is used again."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .attention import Call, attend
from .bfloat16_tiles import has_bfloat16_products
from .blocks import BLOCK, value_width
from .coded_attention import CodedCall, attend_coded
from .coded_blocks import RecordLayout
from .coded_slots import LANE_NUMBERS, ROW_NUMBERS, SLOT_NUMBERS
from .folding import SLOTS
from .integer_kernels import uses_integer_kernels
from .page_tiles import PAGE
from .page_workspace import IndexedBlocks, PageWorkspace
from .parallel import team_of_kernels
from .selected_attention import attend_selected
from .selected_coded_attention import attend_selected_codes
from .tiles import ROWS
from .vector_ir import CACHE_LINE, LANES

# float32 sums over more blocks than this would lose digits; what is summed so far is then added up in float64.
_SEGMENT_BLOCKS = 64
# A call has as few segments, or a double of them, of which most numbers of threads get the same.
_FEWEST_SEGMENTS, _MOST_SEGMENTS = 12, 96
_WORTH_A_SEGMENT = 32  # blocks: starting it and merging its result is then nothing beside them
_NO_FACTORS, _NO_MIXING = np.empty((0, 0), np.float32), np.empty((1, 0, 0), np.float32)
_NO_PAIRS = np.empty((0, 0, 0), np.uint16)
_NOT_GIVEN = {dtype: np.empty((0, 0, 0, 0), dtype) for dtype in (np.uint8, np.float32)}


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros from a cache line's start on: a vector that crosses two lines takes twice as long to load and to store."""
    count = math.prod(shape)
    numbers = np.zeros(count + CACHE_LINE // np.dtype(dtype).itemsize, dtype)
    skipped = -numbers.ctypes.data % CACHE_LINE // numbers.itemsize
    return numbers[skipped : skipped + count].reshape(shape)


class Shape(NamedTuple):
    """
    Of one call of attention. A tuple, because one is made and looked up for every layer of every token.

    Attributes:
        batch: sequences.
        num_kv_heads: of each sequence.
        group: query heads that share a KV head.
        query_length: queries of each head, the last tokens of the sequence.
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
        """Query rows that share a KV head: row `g * query_length + i` is query `i` of the group's query head `g`."""
        return self.group * self.query_length


class CodedBlocks(NamedTuple):
    """
    Blocks of a sequence that are stored as codes. A tuple, because one is made for every layer of every token.

    Attributes:
        keys: uint8 `[num_blocks or more, heads, bytes]`, records of `key_layout`.
        values: uint8 likewise, of `value_layout`.
        first: blocks in full precision before them.
        num_blocks: how many.
        key_layout: see `kernels.coded_blocks`.
        value_layout: likewise.
        query_factors: float32 `[num_kv_heads, key_dim]`: what the query's channels are multiplied by before they are
            rotated, the reciprocals of what the keys' channels were; `None` for ones.
        mixing: float32 `[num_kv_heads, value_dim, value_dim]`: after what is summed up of values was rotated back, row
            vectors are multiplied by it; `None` for nothing.
    """

    keys: np.ndarray
    values: np.ndarray
    first: int
    num_blocks: int
    key_layout: RecordLayout
    value_layout: RecordLayout
    query_factors: np.ndarray | None = None
    mixing: np.ndarray | None = None


@dataclass
class Workspace:
    """
    What a call reads and writes besides keys and values, used again for every call of the same shape.

    Attributes:
        query: float32 `[heads, padded rows, padded key_dim]`, after rotary embedding. What fills it up stays zero.
        out: float32 `[heads, padded rows, padded value_dim]`: softmax(scale * query @ keys.T + mask) @ values; zeros
            where everything is masked.
        lse: float32 `[heads, padded rows]`: natural log of the sum of exp(score), of what was read; minus infinity
            likewise.
        tokens_read: of indexed blocks, by the last call; counted for each KV head.
    """

    shape: Shape
    query: np.ndarray = field(init=False)
    out: np.ndarray = field(init=False)
    lse: np.ndarray = field(init=False)
    tokens_read: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        shape = self.shape
        rows = -(-shape.rows // ROWS) * ROWS
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
        keys: np.ndarray,
        values: np.ndarray,
        num_tokens: int,
        scale: float,
        causal: bool = False,
        visible: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        coded: CodedBlocks | None = None,
        indexed: IndexedBlocks | None = None,
        mass: float = 1.0,
        most: float = 1.0,
    ) -> None:
        """
        Attend `query` to the first `num_tokens`; the result is in `out` and `lse`.

        Args:
            keys: `[blocks, heads, key_dim, 64]`, see `kernels.blocks`; float32, uint16 (bfloat16 bits) or int16 (half
                precision bits).
            values: `[blocks, heads, 64, padded value_dim]`, of the same type; what fills the rows up is zero.
            num_tokens: at least 1.
            scale: of the scores.
            causal: query `i` does not see the `query_length - 1 - i` last tokens.
            visible: uint8 `[batch, query heads, query_length, tokens]`, 0 where a token is not seen. Any of the first
                three sizes may be 1, for all.
            bias: float32, likewise, added to the scaled scores.
            coded: blocks that are not in `keys` and `values`, where those after them follow those before them.
            indexed: blocks of which a part may be read, of those in full precision, or all coded ones; `None` for none.
            mass: read of these only the fewest pages of 16 tokens that, together with all other blocks, carry this
                share of the attention of a KV head's queries, on average over them.
            most: the share of the indexed tokens up to which this is done; where more have to be read, all are.
        """
        shape = self.shape
        # Scores that a scale turns around are not those that pages are rated by.
        parts = indexed if indexed is not None and scale > 0 else None
        set_apart = parts or coded
        apart = 0 if set_apart is None else set_apart.num_blocks
        segments_apart = self._segments(apart) if apart else 0
        segments = segments_apart + self._segments(-(-num_tokens // BLOCK) - apart)
        if segments != len(self.maxima):
            self._make_partial(segments)
        call = Call(
            self.query,
            self._pairs_for(keys),
            keys,
            values,
            num_tokens,
            shape.num_kv_heads,
            shape.group,
            shape.query_length,
            causal,
            scale,
            _NOT_GIVEN[np.uint8] if visible is None else visible,
            _NOT_GIVEN[np.float32] if bias is None else bias,
            self.scores,
            self.corrections,
            self.maxima,
            self.sums,
            self.partial,
            self.out,
            self.lse,
        )
        of_codes = None if coded is None else self._coded_call(call, coded, segments_apart)
        if parts is not None:
            self._pages = self._pages or PageWorkspace(shape.heads, self.query.shape[1], shape.key_dim)
            selected = self._pages.call(call if of_codes is None else of_codes, parts, segments_apart, mass, most)
            (attend_selected if of_codes is None else attend_selected_codes)(*team_of_kernels(), selected)
            self.tokens_read = self._pages.pages_read * PAGE
            return
        if of_codes is None:
            attend(*team_of_kernels(), call)
        else:
            attend_coded(*team_of_kernels(), of_codes)
        self.tokens_read = 0 if indexed is None else indexed.num_blocks * shape.heads * BLOCK

    def _pairs_for(self, keys: np.ndarray) -> np.ndarray:
        """The query in bfloat16, if it and the keys are that, and the processor has products for it."""
        bits = self.query.view(np.uint16)
        if keys.dtype != np.uint16 or keys.shape[2] % 2 or not has_bfloat16_products() or bits[..., ::2].any():
            return _NO_PAIRS
        self.pairs[...] = bits[..., 1::2]
        return self.pairs

    def _segments(self, blocks: int) -> int:
        """Pieces in which to attend to some blocks of all heads, whatever the threads: the order of sums is fixed."""
        segments = _FEWEST_SEGMENTS
        while segments < _MOST_SEGMENTS and 2 * segments * _WORTH_A_SEGMENT <= blocks:
            segments *= 2
        return min(blocks * self.shape.heads, segments * -(-blocks // (segments * _SEGMENT_BLOCKS)))

    def _coded_call(self, call: Call, coded: CodedBlocks, coded_segments: int) -> CodedCall:
        keys, values = coded.key_layout, coded.value_layout
        return CodedCall(
            *call,
            coded.keys,
            coded.values,
            coded.first,
            coded.num_blocks,
            keys.bits,
            values.bits,
            keys.group,
            values.group,
            uses_integer_kernels(),
            keys.dim,
            values.dim,
            keys.rotation,
            values.rotation,
            _NO_FACTORS if coded.query_factors is None else coded.query_factors,
            _NO_MIXING if coded.mixing is None else coded.mixing,
            coded_segments,
            self.rotated,
            self.operands,
            self.row_numbers,
            self.lane_numbers,
            self.slots,
        )
