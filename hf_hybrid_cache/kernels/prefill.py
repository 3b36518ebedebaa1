"""Attention of many queries: calls of the kernel."""

import contextlib
from typing import NamedTuple

import numpy as np

from .attention.prefill_attention import PrefillCall, attend_prefill, scratch_bytes
from .blocks import BLOCK
from .quantized.quantized_blocks import PackedLayout
from .vector.parallel import team_of_kernels
from .vector.processor import has_amx
from .workspace import QuantizedBlocks, aligned_zeros

# Rows of a piece: with enough of them, making a block's operand takes little time beside its products; with few enough,
# the piece stays in the second-level cache.
_MOST_ROWS, _FEWEST_ROWS = 256, 32
# Several pieces for each thread, so that threads end at about the same time.
_PIECES_OF_A_THREAD = 4
_NO_PACKED, _NO_LAYOUT = np.empty((0, 0, 0), np.uint8), PackedLayout(8, 16, 16, 16, 1, False, 1)
_NO_CODES = QuantizedBlocks(_NO_PACKED, _NO_PACKED, 0, 0, _NO_LAYOUT, _NO_LAYOUT)


class _Scratch:
    """
    Scratch memory, kept from call to call: new memory from the system would take half as long as the attention.

    If several threads attend at once, each gets its own memory, and the last that is given back is kept.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def taken(self, threads: int, num_bytes: int) -> np.ndarray:
        """Take the kept memory or make it: float32 `[threads, num_bytes / 4]`, from the start of a cache line on."""
        with contextlib.suppress(IndexError):
            array = self._free.pop()
            if array.shape[0] >= threads and array.shape[1] * 4 == num_bytes:
                return array
        return aligned_zeros((threads, num_bytes // 4), np.float32)

    def give_back(self, array: np.ndarray) -> None:
        self._free[:] = [array]


_scratch = _Scratch()
_wanted: bool | None = None


def set_prefill_kernel(enabled: bool | None) -> None:
    """Let many queries attend by this kernel, or not, in the whole process; `None`, the default: if it is faster."""
    global _wanted
    _wanted = enabled


def uses_prefill_kernel(element: np.dtype) -> bool:
    """Whether many queries attend to blocks of `element` by this kernel. With AMX torch multiplies bfloat16 faster."""
    return not (element == np.uint16 and has_amx()) if _wanted is None else _wanted


class Strided(NamedTuple):
    """
    Numbers `[batch, heads, tokens, dim]` in memory, the last axis contiguous.

    Attributes:
        address: of the first number.
        strides: bytes from a sequence, a head and a token to the next one.
    """

    address: int
    strides: tuple[int, int, int]


def attend_many(
    query: Strided,
    out: Strided,
    has_half_out: bool,
    lse: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    num_tokens: int,
    key_dim: int,
    value_dim: int,
    scale: float,
    seen: np.ndarray,
    visible: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    quantized: QuantizedBlocks | None = None,
) -> None:
    """
    Attend to the first `num_tokens` tokens with any number of queries.

    Args:
        query: bfloat16 if keys are, float32 otherwise.
        out: written, `[batch, query heads, query_length, value_dim]`: softmax(scale * query @ keys.T + mask) @ values;
            zeros for a query that sees no token.
        has_half_out: whether `out` is bfloat16, not float32.
        lse: written, float32 `[batch, query heads, query_length]`: natural log of the sum of exp(score); minus infinity
            for a query that sees no token.
        keys: `[blocks, batch * num_kv_heads, key_dim, 64]`, see `kernels.blocks`; float32, uint16 (bfloat16 bits) or
            int16 (half precision bits).
        values: `[blocks, batch * num_kv_heads, 64, padded value_dim]`, of the same type.
        num_tokens: at least 1.
        key_dim: width of a key.
        value_dim: width of a value.
        scale: of the scores.
        seen: int64 `[batch, query heads, query_length, 2]`: the first token that a query sees, and the one after the
            last. Any of the first three sizes may be 1, for all.
        visible: uint8 `[batch, query heads, query_length, tokens]`, 0 for a token in the range of `seen` that a query
            does not see. Any of the first three sizes may be 1, for all.
        bias: float32, shaped as `visible` may be, added to the scaled scores.
        quantized: blocks that are not in `keys` and `values`, which hold the blocks before and after them without a
            gap.
    """
    batch, query_heads, query_length = lse.shape
    num_kv_heads = keys.shape[1] // batch
    group = query_heads // num_kv_heads
    rows = group * query_length
    team = team_of_kernels()
    wanted = -(-rows * batch * num_kv_heads // (_PIECES_OF_A_THREAD * team.threads))
    # Whole tiles. The result of a row does not depend on the size of a piece.
    rows_at_once = min(_MOST_ROWS, max(_FEWEST_ROWS, -(-wanted // 16) * 16))
    width = values.shape[3]
    scratch = _scratch.taken(team.threads, scratch_bytes(rows_at_once, key_dim, width))
    codes = _NO_CODES if quantized is None else quantized
    call = PrefillCall(
        element=keys.dtype.type(0),
        query=query.address,
        query_strides=query.strides,
        out=out.address,
        out_strides=out.strides,
        has_half_out=has_half_out,
        lse=lse.ctypes.data,
        keys=keys.ctypes.data,
        values=values.ctypes.data,
        block_bytes=(key_dim * BLOCK * keys.itemsize, BLOCK * width * values.itemsize),
        num_tokens=num_tokens,
        batch=batch,
        num_kv_heads=num_kv_heads,
        group=group,
        query_length=query_length,
        key_dim=key_dim,
        value_dim=value_dim,
        width=width,
        scale=float(scale),
        seen=seen.ctypes.data,
        seen_shape=_shape(seen),
        visible=_address(visible),
        visible_shape=_shape(visible),
        bias=_address(bias),
        bias_shape=_shape(bias),
        packed=(codes.keys.ctypes.data, codes.values.ctypes.data),
        packed_bytes=(codes.key_layout.num_bytes, codes.value_layout.num_bytes),
        first_quantized=codes.first,
        quantized_blocks=codes.num_blocks,
        bits=(codes.key_layout.bits, codes.value_layout.bits),
        groups=(codes.key_layout.group, codes.value_layout.group),
        rotations=(codes.key_layout.rotation, codes.value_layout.rotation),
        query_factors=_address(codes.query_factors),
        rotation_matrix=_address(codes.rotation_matrix),
        rows_at_once=rows_at_once,
        scratch=scratch.ctypes.data,
        scratch_bytes=scratch.shape[1] * scratch.itemsize,
    )
    attend_prefill(team.address, call)
    _scratch.give_back(scratch)


def _address(array: np.ndarray | None) -> int:
    assert array is None or array.flags.c_contiguous
    return 0 if array is None else array.ctypes.data


def _shape(array: np.ndarray | None) -> tuple[int, int, int, int]:
    if array is None:
        return 1, 1, 1, 1
    assert array.flags.c_contiguous
    batch, heads, length, row = array.shape
    return batch, heads, length, row
