"""Attention of many queries: what a call of the kernel is given."""

import contextlib
from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import binding

from .blocks import BLOCK
from .coded_blocks import RecordLayout
from .parallel import team_of_kernels
from .prefill_attention import PrefillCall, attend_prefill, scratch_bytes
from .workspace import CodedBlocks, aligned_zeros

# Enough that making an operand of a block is nothing beside its products, and few enough for the second-level cache.
_MOST_ROWS, _FEWEST_ROWS = 256, 32
# Pieces for each thread: those that are left over at the end are short.
_PIECES_OF_A_THREAD = 4
_NO_RECORDS, _NO_LAYOUT = np.empty((0, 0, 0), np.uint8), RecordLayout(8, 16, 16, 16, 1, False, 1)
_NO_CODES = CodedBlocks(_NO_RECORDS, _NO_RECORDS, 0, 0, _NO_LAYOUT, _NO_LAYOUT)


class _Scratch:
    """
    Memory for threads, used again: to get new pages from the system takes as long as half of the attention.

    Several threads may attend at once; then each has its own, and the last one that is given back stays.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def taken(self, threads: int, num_bytes: int) -> np.ndarray:
        """float32 `[threads, num_bytes / 4]`, from a cache line's start on."""
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
    """Say whether many queries attend by this kernel, in the whole process; `None`, the default: where it is faster."""
    global _wanted
    _wanted = enabled


def uses_prefill_kernel(element: np.dtype) -> bool:
    """Whether many queries attend to blocks of `element` by this kernel. With AMX torch multiplies bfloat16 faster."""
    return not (element == np.uint16 and has_amx()) if _wanted is None else _wanted


@cache
def has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16."""
    return bool(binding.get_host_cpu_features().get("amx-bf16"))


class Strided(NamedTuple):
    """
    Numbers `[batch, heads, tokens, dim]` in memory, the last axis contiguous.

    Attributes:
        address: of the first one.
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
    coded: CodedBlocks | None = None,
) -> None:
    """
    Attend to the first `num_tokens` with queries that are as many as you like.

    Args:
        query: bfloat16 where keys are, float32 otherwise.
        out: written, `[batch, query heads, query_length, value_dim]`: softmax(scale * query @ keys.T + mask) @ values;
            zeros where everything is masked.
        has_half_out: whether `out` is bfloat16, not float32.
        lse: written, float32 `[batch, query heads, query_length]`: natural log of the sum of exp(score); minus infinity
            likewise.
        keys: `[blocks, batch * num_kv_heads, key_dim, 64]`, see `kernels.blocks`; float32, uint16 (bfloat16 bits) or
            int16 (half precision bits).
        values: `[blocks, batch * num_kv_heads, 64, padded value_dim]`, of the same type.
        num_tokens: at least 1.
        key_dim: width of a key.
        value_dim: width of a value.
        scale: of the scores.
        seen: int64 `[batch, query heads, query_length, 2]`: the first token that a query sees, and the one after the
            last. Any of the first three sizes may be 1, for all.
        visible: uint8 `[batch, query heads, query_length, tokens]` likewise, 0 where a token between these is not seen.
        bias: float32 likewise, added to the scaled scores.
        coded: blocks that are not in `keys` and `values`, where those after them follow those before them.
    """
    batch, query_heads, query_length = lse.shape
    num_kv_heads = keys.shape[1] // batch
    group = query_heads // num_kv_heads
    rows = group * query_length
    team = team_of_kernels()
    wanted = -(-rows * batch * num_kv_heads // (_PIECES_OF_A_THREAD * team[2]))
    # Whole tiles; what a row finds does not depend on it.
    rows_at_once = min(_MOST_ROWS, max(_FEWEST_ROWS, -(-wanted // 16) * 16))
    width = values.shape[3]
    scratch = _scratch.taken(team[2], scratch_bytes(rows_at_once, key_dim, width))
    codes = _NO_CODES if coded is None else coded
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
        records=(codes.keys.ctypes.data, codes.values.ctypes.data),
        record_bytes=(codes.key_layout.num_bytes, codes.value_layout.num_bytes),
        first_coded=codes.first,
        coded_blocks=codes.num_blocks,
        bits=(codes.key_layout.bits, codes.value_layout.bits),
        groups=(codes.key_layout.group, codes.value_layout.group),
        rotations=(codes.key_layout.rotation, codes.value_layout.rotation),
        query_factors=_address(codes.query_factors),
        mixing=_address(codes.mixing),
        rows_at_once=rows_at_once,
        scratch=scratch.ctypes.data,
        scratch_bytes=scratch.shape[1] * scratch.itemsize,
    )
    attend_prefill(*team, call)
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
