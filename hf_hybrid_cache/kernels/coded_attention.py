"""
Attention of a few queries over coded blocks in host memory, with blocks in full precision before and after them.

As in `attention`; the codes are used as they are, see `coded_tiles`.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .attention import (
    attend_block,
    call_type,
    merge_segments,
    share,
    started_segment,
    taking,
)
from .blocks import BLOCK
from .coded_slots import attend_slots, forms_of, put_into_slot
from .compiled import Needed, jit, jit_inlined, jit_part
from .folding import SLOTS
from .parallel import share_out
from .prefetching import prefetch_bytes
from .rotation import rotate


class CodedCall(NamedTuple):
    """One call of `attend_coded`: the fields of `Call`, whose blocks in full precision follow each other, and more."""

    query: Any  # float32 [heads, rows, key_inner], zeros beyond the width of a key
    pairs: Any  # uint16, the same in bfloat16, or empty
    keys: Any  # float32, uint16 or int16 [float blocks, heads, key_dim, 64]
    values: Any  # the same [float blocks, heads, 64, width]
    num_tokens: int
    num_kv_heads: int
    group: int
    query_length: int
    causal: bool
    scale: float
    visible: Any
    bias: Any
    scores: Any
    corrections: Any
    maxima: Any
    sums: Any
    partial: Any
    out: Any
    lse: Any
    key_records: Any  # uint8 [coded blocks or more, heads, bytes]
    value_records: Any  # uint8 likewise
    first_coded: int  # blocks in full precision before the coded ones
    coded_blocks: int
    key_bits: int
    value_bits: int
    key_group: int  # lanes that share a scale
    value_group: int
    is_integer: bool  # take the processor's integer dot products
    key_dim: int
    value_dim: int
    key_rotation: int  # numbers that were rotated together before they were coded
    value_rotation: int
    query_factors: Any  # float32 [num_kv_heads, key_dim], of the query for coded keys; empty for none
    mixing: Any  # float32 [num_kv_heads, value_dim, value_dim], of what is summed up of coded values; empty for none
    coded_segments: int  # segments of coded blocks; those after them are of blocks in full precision
    rotated: Any  # float32 like the query, scratch
    operands: Any  # float32 [segments, 2, SLOTS, ROWS, longest inner axis], scratch
    row_numbers: Any  # float32 [segments, ROW_NUMBERS, SLOTS, ROWS], scratch
    lane_numbers: Any  # float32 [segments, LANE_NUMBERS, SLOTS, ROWS, LANES], scratch
    slots: Any  # int64 [segments, SLOTS, SLOT_NUMBERS], scratch


@jit
def attend_coded(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.maxima.shape[:2]
    rotate_queries(call)
    share_out(parallel, team, threads, segments, attend_segment, call)
    share_out(parallel, team, threads, heads, merge_coded_segments, call)


@jit_part
def rotate_queries(call):
    """Write the queries for coded keys."""
    query, rotated, factors = call.query, call.rotated, call.query_factors
    heads, rows, inner = query.shape
    for head in range(heads):
        for row in range(rows):
            for d in range(inner):  # an assignment of arrays takes seconds to compile
                rotated[head, row, d] = query[head, row, d]
            if factors.size:
                for d in range(call.key_dim):
                    rotated[head, row, d] *= factors[head % call.num_kv_heads, d]
            rotate(rotated[head, row].ctypes.data, call.key_dim, call.key_rotation)


@jit_part
def attend_segment(segment, call):
    """Attend to some blocks, all coded or all in full precision, as they lie: all heads of a block before the next."""
    if segment >= call.coded_segments:
        attend_full_segment(segment, call)
        return
    heads = call.maxima.shape[1]
    items, plan = started_coded_segment(segment, call)
    forms, tokens = forms_of(segment, call), (0, BLOCK)
    prefetch_mixing(segment, call)
    block = items.start // heads
    head, start = items.start - block * heads, (call.first_coded + block) * BLOCK
    for item in range(items.start, items.stop, SLOTS):
        count = min(SLOTS, items.stop - item)
        for slot in range(count):
            following = min(item + SLOTS + slot, items.stop - 1)
            put_into_slot(slot, item + slot, head, start, tokens, following, tokens, *forms)
            head += 1
            if head == heads:
                head, start = 0, start + BLOCK
        attend_slots(count, plan, *forms)


@jit_inlined
def started_coded_segment(segment, call):
    """The blocks of heads of a segment of coded blocks, by number, and its plan."""
    items = share(segment, call.coded_segments, call.coded_blocks * call.maxima.shape[1])
    return items, started_segment(segment, items, call)


@jit_inlined
def prefetch_mixing(segment, call):
    """Ask for a segment's part of a matrix that is read when all segments are done: by then it has come from memory."""
    if call.mixing.size:
        part = call.mixing.nbytes // call.coded_segments
        prefetch_bytes(call.mixing.ctypes.data + segment * part, part)


@jit_part
def attend_full_segment(segment, call):
    """Attend to some blocks in full precision."""
    heads = call.maxima.shape[1]
    key_block, value_block = call.keys[0, 0].nbytes, call.values[0, 0].nbytes
    keys, values = call.keys.ctypes.data, call.values.ctypes.data
    blocks = (call.num_tokens + BLOCK - 1) // BLOCK - call.coded_blocks
    items = share(segment - call.coded_segments, call.maxima.shape[0] - call.coded_segments, blocks * heads)
    plan = started_segment(segment, items, call)
    for item in items:
        block = item // heads
        head, at = item - block * heads, keys + item * key_block
        start = (block if block < call.first_coded else block + call.coded_blocks) * BLOCK
        attend_block(head, start, at, values + item * value_block, at + key_block, plan)


@jit_part
def merge_coded_segments(head, call):
    """Write the result of a head."""
    kv_head = head % call.num_kv_heads if call.mixing.size else 0
    mixing = call.mixing[kv_head]
    merge_segments(head, call, call.coded_segments, call.value_dim, call.value_rotation, mixing)


def coded_attention_kernels(element: np.dtype) -> list[Needed]:
    """What attends to coded blocks beside blocks of `element`."""
    return [(attend_coded, taking(coded_call_type(element)))]


def coded_call_type(element: np.dtype) -> Any:
    """Of a `CodedCall` with blocks of `element`."""
    blocks, records = numba.from_dtype(element)[:, :, :, ::1], numba.uint8[:, :, ::1]
    real = numba.float32
    fields = {
        "keys": blocks,
        "values": blocks,
        "key_records": records,
        "value_records": records,
        "is_integer": numba.boolean,
        "query_factors": real[:, ::1],
        "mixing": real[:, :, ::1],
        "rotated": real[:, :, ::1],
        "operands": real[:, :, :, :, ::1],
        "row_numbers": real[:, :, :, ::1],
        "lane_numbers": real[:, :, :, :, ::1],
        "slots": numba.int64[:, :, ::1],
    }
    return call_type(CodedCall, fields)
