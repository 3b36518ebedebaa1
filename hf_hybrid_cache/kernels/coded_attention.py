"""
Attention of a few queries over coded blocks in host memory, with blocks in full precision before and after them.

As in `attention`; the codes are used as they are, see `coded_tiles`.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .attention import (
    add_segments,
    attend_float_block,
    signature,
    start_segment,
    weigh_segments,
    weights_of_tile,
)
from .blocks import BLOCK
from .coded_tiles import (
    fold_tile,
    score_coded_tile,
    score_narrow_coded_tile,
    weigh_coded_tile,
    weigh_narrow_coded_tile,
)
from .compiled import jit
from .parallel import share_out
from .rotation import rotate
from .tiles import ROWS, tile_columns


class CodedCall(NamedTuple):
    """One call of `attend_coded`: the fields of `Call`, whose blocks in full precision follow each other, and more."""

    query: Any  # float32 [heads, rows, key_inner], zeros beyond the width of a key
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
    coded_segments: int  # segments of coded blocks; those after them are of blocks in full precision
    rotated: Any  # float32 like the query, scratch
    operands: Any  # float32 [segments, 2, ROWS, longest inner axis], scratch
    steps: Any  # float32 [segments, 2, ROWS], scratch


@jit
def attend_coded(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.maxima.shape[:2]
    call.rotated[:] = call.query
    for head in range(heads):
        for row in range(call.query.shape[1]):
            rotate(call.rotated[head, row], call.key_dim, call.key_rotation)
    share_out(parallel, team, threads, segments, _attend_segment, call)
    share_out(parallel, team, threads, heads, _merge_segments, call)


@jit
def _attend_segment(segment, call):
    """Attend to some blocks, all coded or all in full precision, as they lie: all heads of a block before the next."""
    heads = call.maxima.shape[1]
    start_segment(segment, call)
    if segment < call.coded_segments:
        key_record, value_record = call.key_records.shape[2], call.value_records.shape[2]
        for item in _share(segment, call.coded_segments, call.coded_blocks * heads):
            block = item // heads
            keys = call.key_records.ctypes.data + item * key_record
            values = call.value_records.ctypes.data + item * value_record
            start = (call.first_coded + block) * BLOCK
            _attend_coded_block(segment, item - block * heads, start, keys, values, keys + key_record, call)
    else:
        key_block, value_block = call.keys[0, 0].nbytes, call.values[0, 0].nbytes
        blocks = (call.num_tokens + BLOCK - 1) // BLOCK - call.coded_blocks
        segments = call.maxima.shape[0] - call.coded_segments
        for item in _share(segment - call.coded_segments, segments, blocks * heads):
            block = item // heads
            keys = call.keys.ctypes.data + item * key_block
            values = call.values.ctypes.data + item * value_block
            start = (block if block < call.first_coded else block + call.coded_blocks) * BLOCK
            attend_float_block(segment, item - block * heads, start, keys, values, keys + key_block, call)


@jit
def _share(part, parts, items):
    return range(part * items // parts, (part + 1) * items // parts)


@jit
def _merge_segments(head, call):
    """Merge the segments' results of one head by their log-sum-exp, after rotating back what is of coded values."""
    segments, rows, width = call.maxima.shape[0], call.out.shape[1], call.out.shape[2]
    weights = np.empty(segments, np.float64)
    merged = np.empty(width, np.float64)
    for row in range(rows):
        total = weigh_segments(head, row, call, weights)
        merged[:] = 0
        add_segments(head, row, 0, call.coded_segments, call, weights, merged)
        rotate(merged, call.value_dim, call.value_rotation)
        add_segments(head, row, call.coded_segments, segments, call, weights, merged)
        for column in range(width):
            call.out[head, row, column] = merged[column] / total if total != 0 else 0.0


@jit
def _attend_coded_block(segment, head, start, keys, values, ahead, call):
    """Attend to one coded block of one head; as `attend_float_block`."""
    rows, inner = call.query.shape[1:]
    width = call.partial.shape[3]
    scores, corrections = call.scores[segment].ctypes.data, call.corrections[segment].ctypes.data
    scratch, operand = call.operands[segment, 0].ctypes.data, call.operands[segment, 1].ctypes.data
    steps, constants = call.steps[segment, 0].ctypes.data, call.steps[segment, 1].ctypes.data
    key_scales = keys + inner * call.key_bits // 8 * BLOCK
    key_groups = (BLOCK + call.key_group - 1) // call.key_group
    key_limit = _limit(inner, call.key_bits) if call.is_integer else 0
    value_scales = values + call.value_bits * BLOCK // 8 * width
    value_groups = (width + call.value_group - 1) // call.value_group
    value_limit = _limit(BLOCK, call.value_bits) if call.is_integer else 0
    for row in range(0, rows, ROWS):
        query = call.rotated[head, row].ctypes.data
        for group in range(key_groups):
            scales = key_scales + group * inner * 2
            lows = scales + key_groups * inner * 2
            fold_tile(query, inner * 4, scales, lows, inner, key_limit, scratch, operand, steps, constants)
            column, end = group * call.key_group, min((group + 1) * call.key_group, BLOCK)
            while column + tile_columns() <= end:
                score_coded_tile(
                    call.key_bits, call.is_integer, operand, keys, inner, BLOCK, column, steps, constants, corrections,
                    scores, BLOCK * 4, values,
                )  # fmt: skip
                column += tile_columns()
            while column < end:
                score_narrow_coded_tile(
                    call.key_bits, call.is_integer, operand, keys, inner, BLOCK, column, steps, constants, corrections,
                    scores, BLOCK * 4, values,
                )  # fmt: skip
                column += 16
        weights_of_tile(segment, head, row, start, call)
        target = call.partial[segment, head, row].ctypes.data
        for group in range(value_groups):
            scales = value_scales + group * BLOCK * 2
            lows = scales + value_groups * BLOCK * 2
            fold_tile(scores, BLOCK * 4, scales, lows, BLOCK, value_limit, scratch, operand, steps, constants)
            column, end = group * call.value_group, min((group + 1) * call.value_group, width)
            while column + tile_columns() <= end:
                weigh_coded_tile(
                    call.value_bits, call.is_integer, operand, values, BLOCK, width, column, steps, constants,
                    corrections, target, width * 4, ahead,
                )  # fmt: skip
                column += tile_columns()
            while column < end:
                weigh_narrow_coded_tile(
                    call.value_bits, call.is_integer, operand, values, BLOCK, width, column, steps, constants,
                    corrections, target, width * 4, ahead,
                )  # fmt: skip
                column += 16


@jit
def _limit(inner, bits):
    """The largest 16-bit number whose products with codes, added up over the inner axis, stay within 32 bits."""
    return min(32767, (2**31 - 1) // ((2**bits - 1) * inner))


def compile_coded_attention(element: np.dtype) -> None:
    """Compile attention over coded blocks beside blocks of `element`, or load it from Numba's cache on disk."""
    blocks, records = numba.from_dtype(element)[:, :, :, ::1], numba.uint8[:, :, ::1]
    real = numba.float32
    fields = {
        "keys": blocks,
        "values": blocks,
        "key_records": records,
        "value_records": records,
        "is_integer": numba.boolean,
        "rotated": real[:, :, ::1],
        "operands": real[:, :, :, ::1],
        "steps": real[:, :, ::1],
    }
    attend_coded.compile(signature(CodedCall, fields))
