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
    signature,
    started_segment,
    weights_of_tile,
)
from .blocks import BLOCK
from .coded_tiles import (
    MOST_BITS_OF_QUADS,
    fold_tile,
    prefetch_numbers,
    score_coded_tile,
    score_narrow_coded_tile,
    weigh_coded_tile,
    weigh_narrow_coded_tile,
)
from .compiled import jit, jit_part
from .parallel import share_out
from .rotation import rotate
from .tiles import ROWS, tile_columns

# Blocks of heads that are attended to side by side: each step of one waits for the step before, not for another block.
SLOTS = 4


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
    query_factors: Any  # float32 [num_kv_heads, key_dim], of the query for coded keys; empty for none
    mixing: Any  # float32 [num_kv_heads, value_dim, value_dim], of what is summed up of coded values; empty for none
    coded_segments: int  # segments of coded blocks; those after them are of blocks in full precision
    rotated: Any  # float32 like the query, scratch
    operands: Any  # float32 [segments, SLOTS, 2, ROWS, longest inner axis], scratch
    steps: Any  # float32 [segments, SLOTS, 2, ROWS], scratch


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
    for head in range(call.maxima.shape[1]):
        for row in range(call.query.shape[1]):
            for d in range(call.query.shape[2]):  # an assignment of arrays takes seconds to compile
                call.rotated[head, row, d] = call.query[head, row, d]
            if call.query_factors.size:
                for d in range(call.key_dim):
                    call.rotated[head, row, d] *= call.query_factors[head % call.num_kv_heads, d]
            rotate(call.rotated[head, row], call.key_dim, call.key_rotation)


@jit_part
def attend_segment(segment, call):
    """Attend to some blocks, all coded or all in full precision, as they lie: all heads of a block before the next."""
    if segment >= call.coded_segments:
        attend_full_segment(segment, call)
        return
    heads = call.maxima.shape[1]
    items, plan = started_coded_segment(segment, call)
    keys, values = call.key_records.ctypes.data, call.value_records.ctypes.data
    forms = forms_of(segment, call)
    prefetch_mixing(segment, call)
    for item in range(items.start, items.stop, SLOTS):
        _attend_coded_blocks(item, min(SLOTS, items.stop - item), heads, keys, values, call.first_coded, plan, *forms)


@jit_part
def started_coded_segment(segment, call):
    """The blocks of heads of a segment of coded blocks, by number, and its plan."""
    items = share(segment, call.coded_segments, call.coded_blocks * call.maxima.shape[1])
    return items, started_segment(segment, items, call)


@jit_part
def prefetch_mixing(segment, call):
    """Ask for a segment's part of a matrix that is read when all segments are done: by then it has come from memory."""
    if call.mixing.size:
        part = call.mixing.nbytes // call.coded_segments
        prefetch_numbers(call.mixing.ctypes.data + segment * part, part)


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


class Form(NamedTuple):
    """How the records of keys, or of values, are taken apart; plain numbers."""

    bits: int
    limit: int  # of `fold_tile`
    inner: int
    lanes: int
    group: int
    groups: int
    scales: int  # where they start in a record
    record: int  # bytes


class Scratch(NamedTuple):
    """Addresses of what a segment writes and reads again for each tile: those of the first slot."""

    rotated: int  # not written: the query
    folded: int
    operand: int
    steps: int
    constants: int
    operand_bytes: int  # from a slot to the next
    step_bytes: int


@jit_part
def forms_of(segment, call):
    """How keys and values are taken apart, and where a segment writes meanwhile."""
    inner, width = call.query.shape[2], call.partial.shape[3]
    key_groups = (BLOCK + call.key_group - 1) // call.key_group
    value_groups = (width + call.value_group - 1) // call.value_group
    return (
        Form(
            call.key_bits,
            _limit(inner, call.key_bits, 127) if call.is_integer else 0,
            inner,
            BLOCK,
            call.key_group,
            key_groups,
            inner * call.key_bits // 8 * BLOCK,
            call.key_records.shape[2],
        ),
        Form(
            call.value_bits,
            _limit(BLOCK, call.value_bits, 255) if call.is_integer else 0,
            BLOCK,
            width,
            call.value_group,
            value_groups,
            BLOCK * call.value_bits // 8 * width,
            call.value_records.shape[2],
        ),
        Scratch(
            call.rotated.ctypes.data,
            call.operands[segment, 0, 0].ctypes.data,
            call.operands[segment, 0, 1].ctypes.data,
            call.steps[segment, 0, 0].ctypes.data,
            call.steps[segment, 0, 1].ctypes.data,
            call.operands[segment, 0].nbytes,
            call.steps[segment, 0].nbytes,
        ),
    )


@jit_part
def merge_coded_segments(head, call):
    """Write the result of a head."""
    kv_head = head % call.num_kv_heads if call.mixing.size else 0
    mixing = call.mixing[kv_head]
    merge_segments(head, call, call.coded_segments, call.value_dim, call.value_rotation, mixing)


@jit_part
def _attend_coded_blocks(first, count, heads, keys, values, first_coded, plan, key_form, value_form, at):
    """Attend to the blocks of some heads that follow each other, from number `first` on; as `attend_block`."""
    keys, values = keys + first * key_form.record, values + first * value_form.record
    ahead = keys + count * key_form.record
    for slot in range(count):
        prefetch_numbers(
            values + slot * value_form.record + value_form.scales, value_form.groups * value_form.inner * 4
        )
        prefetch_numbers(ahead + slot * key_form.record + key_form.scales, key_form.groups * key_form.inner * 4)
    for row in range(0, plan.rows, ROWS):
        for group in range(key_form.groups):
            for slot in range(count):
                query = at.rotated + ((first + slot) % heads * plan.rows + row) * plan.query_bytes
                fold_group(
                    slot, query, plan.query_bytes, keys + slot * key_form.record, group, 0, key_form.inner, key_form, at
                )
            for slot in range(count):
                record, next_read = keys + slot * key_form.record, values + slot * value_form.record
                score_tokens(slot, record, group, 0, BLOCK, next_read, plan, key_form, at)
        for slot in range(count):
            block = (first + slot) // heads
            weights_of_tile(first + slot - block * heads, row, (first_coded + block) * BLOCK, plan, slot)
        for group in range(value_form.groups):
            for slot in range(count):
                weights = plan.scores + slot * ROWS * BLOCK * 4
                record = values + slot * value_form.record
                fold_group(slot, weights, BLOCK * 4, record, group, 0, BLOCK, value_form, at)
            for slot in range(count):
                target = plan.partial + ((first + slot) % heads * plan.rows + row) * plan.width * 4
                record, next_read = values + slot * value_form.record, ahead + slot * key_form.record
                weigh_tokens(slot, record, group, 0, BLOCK, next_read, target, plan, value_form, at)


@jit_part
def fold_group(slot, rows, row_bytes, record, group, first, end, form, at):
    """Fold scales and lows of a group, those of the inner axis from `first` to `end`, into rows: into the operand."""
    scales = record + form.scales + (group * form.inner + first) * 2
    operands, numbers = slot * at.operand_bytes, slot * at.step_bytes
    fold_tile(
        rows + first * 4, row_bytes, scales, scales + form.groups * form.inner * 2, end - first, form.bits, form.limit,
        at.folded + operands, at.operand + operands, at.steps + numbers, at.constants + numbers,
    )  # fmt: skip


@jit_part
def score_tokens(slot, record, group, first, end, ahead, plan, form, at):
    """Write the scores of those of a group's tokens that are from `first` to `end`, multiples of 16."""
    operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * at.step_bytes
    constants, corrections = at.constants + slot * at.step_bytes, plan.corrections + slot * ROWS * 4
    scores = plan.scores + slot * ROWS * BLOCK * 4
    column, end = max(first, group * form.group), min(end, (group + 1) * form.group)
    while column + tile_columns() <= end:
        score_coded_tile(
            form.bits, form.limit > 0, operand, record, form.inner, form.lanes, column, steps, constants, corrections,
            scores, BLOCK * 4, ahead,
        )  # fmt: skip
        column += tile_columns()
    while column < end:
        score_narrow_coded_tile(
            form.bits, form.limit > 0, operand, record, form.inner, form.lanes, column, steps, constants, corrections,
            scores, BLOCK * 4, ahead,
        )  # fmt: skip
        column += 16


@jit_part
def weigh_tokens(slot, record, group, first, end, ahead, target, plan, form, at):
    """Correct what was summed up of a group's channels, and add those of tokens `first` to `end`, which are folded."""
    operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * at.step_bytes
    constants, corrections = at.constants + slot * at.step_bytes, plan.corrections + slot * ROWS * 4
    words, length = record + first * form.bits // 8 * form.lanes, end - first
    column, last = group * form.group, min((group + 1) * form.group, form.lanes)
    while column + tile_columns() <= last:
        weigh_coded_tile(
            form.bits, form.limit > 0, operand, words, length, form.lanes, column, steps, constants, corrections,
            target, form.lanes * 4, ahead,
        )  # fmt: skip
        column += tile_columns()
    while column < last:
        weigh_narrow_coded_tile(
            form.bits, form.limit > 0, operand, words, length, form.lanes, column, steps, constants, corrections,
            target, form.lanes * 4, ahead,
        )  # fmt: skip
        column += 16


@jit_part
def _limit(inner, bits, byte):
    """The largest integer to round to: of 8 bits, or whose products with codes, added up, stay within 32 bits."""
    return byte if bits <= MOST_BITS_OF_QUADS else min(32767, (2**31 - 1) // ((2**bits - 1) * inner))


def compile_coded_attention(element: np.dtype) -> None:
    """Compile attention over coded blocks beside blocks of `element`, or load it from Numba's cache on disk."""
    attend_coded.compile(signature(coded_call_type(element)))


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
        "steps": real[:, :, :, ::1],
    }
    return call_type(CodedCall, fields)
