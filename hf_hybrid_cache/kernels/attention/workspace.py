"""Calls of the kernels of attention: what is asked, written to memory, and memory that calls use again."""

import math
import struct
from typing import NamedTuple

import numpy as np

from ..forms.blocks import value_width
from ..vector.numbers_at import bits_of_double
from ..vector.operations import Operations
from ..vector.parallel import team_of_kernels
from ..vector.processor import has_amx, has_bfloat16_products, uses_integer_kernels
from ..vector.tiles import ROWS
from ..vector.vector_ir import BLOCK, CACHE_LINE, LOG2_E
from .attention import ATTEND, division, merge_head, take_queries
from .attention_call import CALL_BYTES, SCRATCH, AttentionCall, Scratch
from .codes import TILE_BYTES, TILES_AT_ONCE, attend_codes
from .prefill_attention import attend_prefill
from .stored_blocks import StoredBlocks

# Rows of a part of many queries: with enough of them, making a block's operand takes little time beside its products;
# with few enough, the part stays in the second-level cache.
_MOST_ROWS, _FEWEST_ROWS = 256, 32
# Several parts of many queries for each thread, so that threads end at about the same time.
_PARTS_OF_A_THREAD = 4

_OF_EACH_CALL = struct.Struct("@12qd6q")  # the fields up to `first_part`; the factor is a float64
_NOTHING = np.zeros(0, np.uint8), 0
_SEEN, _CAP, _GROUP = (8 * AttentionCall._fields.index(name) for name in ("seen", "cap", "group"))


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


class Strided(NamedTuple):
    """
    Numbers `[batch, query heads, query_length, dim]` in memory, the last axis contiguous.

    Attributes:
        address: of the first number.
        of_sequence: bytes from a sequence to the next one.
        of_head: bytes from a head to the next one.
        of_token: bytes from a query to the next one.
        is_bfloat16: whether they are bfloat16, not float32.
    """

    address: int
    of_sequence: int
    of_head: int
    of_token: int
    is_bfloat16: bool


class WorkingMemory:
    """
    Memory in which calls of any shape work, one after the other.

    It grows: new memory from the system would take half as long as attention of many queries.

    Attributes:
        user: the calls that worked in it last.
    """

    def __init__(self) -> None:
        self.user: _Calls | None = None
        self._held = _NOTHING  # in one attribute: an interruption leaves both or none

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return self._held[0].nbytes

    def of(self, user: "_Calls", num_bytes: int, cleared: int) -> int:
        """
        The address of at least so many bytes.

        They are as `user` left them; after another user the first ones, `cleared`, are zeros.
        """
        memory, address = self._held
        if num_bytes > memory.nbytes:
            del memory
            self._held = _NOTHING  # given back before more is taken
            memory = aligned_zeros(num_bytes)
            address = memory.ctypes.data
            self._held = memory, address
        elif user is not self.user:
            memory[:cleared] = 0
        self.user = user
        return address


class _Calls:
    """
    Calls of one shape: what is asked, of which each call writes what is new.

    Args:
        shape: of the calls.
        rows_at_once: rows of a head in a part.
        sizes: bytes of each array of a part's memory, by names of `Scratch`.
        shared: the same of arrays that all parts share.
        others: further fields of `Scratch`.

    Attributes:
        numbers: an `AttentionCall` and its `Scratch`.
        address: of these.
    """

    def __init__(
        self, shape: Shape, rows_at_once: int, sizes: dict[str, int], shared: dict[str, int], others: dict[str, int]
    ):
        self.numbers = np.zeros(CALL_BYTES // 8, np.int64)
        self._buffer, self.address = self.numbers.data, int(self.numbers.ctypes.data)
        rows = shape.group * shape.query_length
        self._write(_GROUP, shape.group, shape.query_length, rows, rows_at_once)
        shared_offsets, self._shared_bytes = laid_out(shared)
        offsets, self._part_bytes = laid_out(sizes)
        self._offsets = shared_offsets | {name: self._shared_bytes + offset for name, offset in offsets.items()}
        self._others = others | {"part_bytes": self._part_bytes}
        # What is written. Writing may be interrupted.
        self._works_at = 0
        self._is_masked = False
        self._cap: float | None = None

    def _write(self, offset: int, *numbers: int) -> None:
        self.numbers[offset // 8 : offset // 8 + len(numbers)] = numbers

    def ask(
        self,
        memory: WorkingMemory,
        at_once: int,
        blocks: StoredBlocks,
        query: Strided,
        out: Strided,
        lse: int,
        scale: float,
        operand_is_bfloat16: bool,
        rotated_is_bfloat16: bool,
        parts: int,
        quantized_parts: int,
        first_part: int,
        seen: np.ndarray | None,
        visible: np.ndarray | None,
        bias: np.ndarray | None,
        cap: float | None,
    ) -> None:
        """
        Write a call, and have memory to work in for `at_once` parts or threads.

        The arguments are those of `attend_many`, or fields of `AttentionCall`.
        """
        # Rows of queries that fill up a tile are not written: what was there before might be slow to multiply.
        start = memory.of(self, self._shared_bytes + at_once * self._part_bytes, self._shared_bytes)
        if start != self._works_at:
            self._works_at = 0
            fields = {name: start + offset for name, offset in self._offsets.items()} | self._others
            self._write(SCRATCH, *(fields.get(name, 0) for name in Scratch._fields))
            self._works_at = start
        factor = scale * LOG2_E if cap is None else scale / cap
        _OF_EACH_CALL.pack_into(
            self._buffer, 0, blocks.address, *query, *out, lse, factor, operand_is_bfloat16,
            rotated_is_bfloat16, quantized_parts > 0 and uses_integer_kernels(), parts, quantized_parts, first_part,
        )  # fmt: skip
        if cap != self._cap:
            self._cap = math.nan  # unlike any other, should the next line be interrupted
            self._write(_CAP, 0 if cap is None else bits_of_double(cap * LOG2_E))
            self._cap = cap
        is_masked = seen is not None or visible is not None or bias is not None
        if is_masked or self._is_masked:
            self._is_masked = True
            self._write(_SEEN, *_mask(seen), *_mask(visible), *_mask(bias))
            self._is_masked = is_masked


class _CallsOfMany(_Calls):
    """Calls of many queries."""

    def __init__(self, shape: Shape, rows_at_once: int):
        self.key = shape, rows_at_once
        inner, width = value_width(shape.key_dim), value_width(shape.value_dim)
        side = {"maxima": 4 * rows_at_once, "sums": 4 * rows_at_once, "partial": 4 * rows_at_once * width}
        side_bytes = laid_out(side)[1]
        sizes = side | {"other side": side_bytes, "scores": 4 * ROWS * BLOCK, "corrections": 4 * ROWS}
        sizes |= {"operand": 4 * rows_at_once * inner, "rotated": 4 * rows_at_once * inner, "ranges": 16 * rows_at_once}
        sizes |= {"key_operand": 4 * inner * BLOCK, "value_operand": 4 * BLOCK * width}
        super().__init__(shape, rows_at_once, sizes, {}, {"side_bytes": side_bytes})


class Workspace:
    """
    Attention of few queries, in calls of one shape.

    Args:
        shape: of the calls.
        memory: in which they work, and calls of other shapes.

    Attributes:
        shape: of the calls.
        asked: int64, the call that was written last: an `AttentionCall` and its `Scratch`.
        lse: float32 `[batch, query heads, query_length]`, of the last call: natural log of the sum of exp(score) over
            the tokens; minus infinity for a query that sees no token.
    """

    def __init__(self, shape: Shape, memory: WorkingMemory | None = None):
        self.shape = shape
        batch, num_kv_heads, group, query_length, key_dim, value_dim = shape
        self.lse = np.zeros((batch, num_kv_heads * group, query_length), np.float32)
        self._lse: int = self.lse.ctypes.data
        rows = -(-group * query_length // ROWS) * ROWS
        self._multiplies_bfloat16 = key_dim % 2 == 0 and has_bfloat16_products()
        inner, of_rows = value_width(key_dim), 4 * num_kv_heads * rows
        sizes = {"maxima": of_rows, "sums": of_rows, "partial": of_rows * value_width(value_dim)}
        shared = {"operand": of_rows * inner, "rotated": of_rows * inner, "ranges": 4 * of_rows}
        shared = {name: batch * num_bytes for name, num_bytes in shared.items()}
        longest, of_tiles = max(inner, BLOCK), 4 * TILES_AT_ONCE * ROWS
        work = {"scores": of_tiles * BLOCK, "corrections": of_tiles, "steps": of_tiles, "constants": of_tiles}
        work |= {"folded": 4 * ROWS * longest, "rounded": of_tiles * longest, "tiles": TILES_AT_ONCE * TILE_BYTES}
        offsets, work_bytes = laid_out(work)
        offsets |= {"rounded_bytes": 4 * ROWS * longest, "work_bytes": work_bytes}
        self._calls = _Calls(shape, rows, sizes, shared, offsets)
        self._memory, self.asked = memory or WorkingMemory(), self._calls.numbers
        # By the type of the blocks, and whether some are quantized.
        self._operations: dict[tuple[np.dtype, bool], Operations] = {}

    def attend(
        self,
        query: Strided,
        out: Strided,
        blocks: StoredBlocks,
        scale: float,
        visible: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        cap: float | None = None,
        seen: np.ndarray | None = None,
    ) -> None:
        """
        Attend to stored tokens.

        Args:
            query: after rotary embedding.
            out: written, `[batch, query heads, query_length, value_dim]`: softmax(scale * query @ keys.T + mask) @
                values; zeros for a query that sees no token.
            blocks: their record.
            scale: of the scores.
            visible: uint8 `[batch, query heads, query_length, tokens]`, 0 for a token that a query does not see. Any of
                the first three sizes may be 1, for all.
            bias: float32, shaped as `visible` may be, added to the scaled scores.
            cap: scores are `cap * tanh(scale * query @ keys.T / cap)` instead of the products, before a mask.
            seen: int64 `[batch, query heads, query_length, 2]`, the first token that a query sees, and the one after
                the last. Any of the first three sizes may be 1, for all. Blocks that no query sees take no time.

        Raises:
            MemoryError: the host has no memory to work in; the results are not whole.
        """
        parts, in_codes = self.ask(query, out, blocks, scale, visible, bias, cap, seen)
        kind = blocks.element, in_codes > 0
        if kind not in self._operations:
            kernels = [take_queries, *([attend_codes] if in_codes else []), ATTEND[blocks.element], merge_head]
            beside = [2] if in_codes else []
            self._operations[kind] = Operations([(kernel, self._calls.address) for kernel in kernels], beside)
        operations = self._operations[kind]
        operations.set_parts([blocks.heads, *([in_codes] if in_codes else []), parts - in_codes, blocks.heads])
        operations.run()

    def ask(
        self,
        query: Strided,
        out: Strided,
        blocks: StoredBlocks,
        scale: float,
        visible: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        cap: float | None = None,
        seen: np.ndarray | None = None,
        shared_parts: int = 0,
        are_shared: bool = False,
    ) -> tuple[int, int]:
        """
        Write a call, see `attend`; return the number of its parts, and how many of them are of quantized blocks.

        Masks are read when it runs: the caller keeps them, and may change their numbers before it runs again. Of
        `shared_parts`, see `StoredBlocks.shared_parts`, the call has these alone if they `are_shared`, or else all
        others.
        """
        batch, coded = self.shape.batch, blocks.quantized_blocks
        in_codes, in_full = parts_of(coded), parts_of(blocks.blocks_seen - coded)
        if are_shared:
            in_codes, in_full = (shared_parts, 0) if coded else (0, shared_parts)
        elif coded:
            in_codes -= shared_parts
        else:
            in_full -= shared_parts
        parts = in_codes + in_full
        as_they_are = self._multiplies_bfloat16 and query.is_bfloat16 and blocks.element == np.uint16
        self._calls.ask(
            self._memory, batch * parts, blocks, query, out, self._lse, scale, as_they_are, False, parts, in_codes,
            0 if are_shared else shared_parts, seen, visible, bias, cap,
        )  # fmt: skip
        return batch * parts, batch * in_codes


def parts_of(blocks: int) -> int:
    """Number of parts for some blocks of a sequence."""
    _, whole, others = division.py_func(blocks)
    return int(whole + others)


_wanted: bool | None = None


def set_prefill_kernel(enabled: bool | None) -> None:
    """Let many queries attend by this kernel, or not, in the whole process; `None`, the default: if it is faster."""
    global _wanted
    _wanted = enabled


def uses_prefill_kernel(element: np.dtype) -> bool:
    """Whether many queries attend to blocks of `element` by this kernel. With AMX torch multiplies bfloat16 faster."""
    return not (element == np.uint16 and has_amx()) if _wanted is None else _wanted


def attend_many(
    query: Strided,
    out: Strided,
    lse: np.ndarray,
    blocks: StoredBlocks,
    scale: float,
    seen: np.ndarray,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    memory: WorkingMemory | None = None,
    cap: float | None = None,
) -> None:
    """
    Attend to stored tokens with any number of queries.

    Args:
        query: bfloat16 if keys are, float32 otherwise.
        out: written, `[batch, query heads, query_length, value_dim]`: softmax(scale * query @ keys.T + mask) @ values;
            zeros for a query that sees no token.
        lse: written, float32 `[batch, query heads, query_length]`: natural log of the sum of exp(score); minus infinity
            for a query that sees no token.
        blocks: the record of the tokens.
        scale: of the scores.
        seen: int64 `[batch, query heads, query_length, 2]`: the first token that a query sees, and the one after the
            last. Any of the first three sizes may be 1, for all.
        visible: uint8 `[batch, query heads, query_length, tokens]`, 0 for a token in the range of `seen` that a query
            does not see. Any of the first three sizes may be 1, for all.
        bias: float32, shaped as `visible` may be, added to the scaled scores.
        memory: to work in, and other calls.
        cap: of the scores, as in `Workspace.attend`.

    Raises:
        MemoryError: the host has no memory to work in; the results are not whole.
    """
    batch, query_heads, query_length = lse.shape
    heads, team = blocks.heads, team_of_kernels()
    group = query_heads * batch // heads
    rows = group * query_length
    # Whole tiles. The result of a row does not depend on the size of a part.
    wanted = -(-rows * heads // (_PARTS_OF_A_THREAD * team.threads))
    rows_at_once = min(_MOST_ROWS, max(_FEWEST_ROWS, -(-wanted // 16) * 16))
    shape = Shape(batch, heads // batch, group, query_length, blocks.key_dim, blocks.value_dim)
    memory = memory or WorkingMemory()
    calls = memory.user
    if not isinstance(calls, _CallsOfMany) or calls.key != (shape, rows_at_once):
        calls = _CallsOfMany(shape, rows_at_once)
    is_packed = blocks.element == np.uint16 and has_bfloat16_products()
    calls.ask(
        memory, team.threads, blocks, query, out, lse.ctypes.data, scale, is_packed, is_packed,
        -(-rows // rows_at_once) * heads, 0, 0, seen, visible, bias, cap,
    )  # fmt: skip
    attend_prefill(team.address, calls.address, blocks.element.type(0))


def laid_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of arrays, each from the start of a cache line on, and the bytes of all."""
    offsets, end = {}, 0
    for name, num_bytes in sizes.items():
        offsets[name] = end
        end += -(-num_bytes // CACHE_LINE) * CACHE_LINE
    return offsets, end


def aligned_zeros(num_bytes: int) -> np.ndarray:
    """Zeros from the start of a cache line on. A vector across two lines takes twice as long to load and to store."""
    memory = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + num_bytes]


def _mask(array: np.ndarray | None) -> tuple[int, int, int, int]:
    """The address of a mask and its strides, see `AttentionCall`; its last axis is contiguous."""
    if array is None:
        return 0, 0, 0, 0
    assert array.strides[3] == array.itemsize or array.shape[3] == 1
    sequence, head, token = (
        0 if size == 1 else stride for size, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )
    return array.ctypes.data, sequence, head, token
