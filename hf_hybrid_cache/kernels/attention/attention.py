"""
Attention of a few queries over blocks in full precision in host memory, in operations on an `AttentionCall`.

It makes one pass with a running maximum (arXiv:1805.02867). Parts split the work over tokens as well as heads
(Flash-Decoding); their partial results are merged by log-sum-exp in float64. Each key and value is read once, whatever
the number of query heads.
"""

import numba
import numpy as np

from ..vector.compiled import Kernel, Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import call_at
from ..vector.numbers_at import floats_at
from ..vector.tiles import ROWS, score, score_bfloat16, softmax_tile, weigh
from ..vector.vector_ir import BLOCK
from .attention_call import (
    AttentionCall,
    cap_tile,
    mask_tile,
    merge_rows,
    reset_rows,
    row_bytes,
    score_factor,
    scratch_at,
    shows,
    stored_at,
    take_ranges,
    take_rows,
)


@jit
def take_queries(head, address):
    """Write the queries of a KV head to its rows, and what they see."""
    call, scratch = call_at(address, AttentionCall), scratch_at(address)
    row = head * call.rows_at_once
    operand = scratch.operand + row * row_bytes(call.operand_is_bfloat16, address)
    rotated = scratch.rotated + row * row_bytes(call.rotated_is_bfloat16, address)
    take_rows(head, 0, call.rows, operand, rotated, address)
    if call.seen:
        take_ranges(head, 0, call.rows_at_once, scratch.ranges + row * 16, address)


@jit
def attend_float32(part, address):
    """Attend to a part of the blocks in full precision."""
    _attend_part(np.float32(0), part, address)


@jit
def attend_bfloat16(part, address):
    """Attend to a part of the blocks in bfloat16."""
    _attend_part(np.uint16(0), part, address)


@jit
def attend_float16(part, address):
    """Attend to a part of the blocks in half precision."""
    _attend_part(np.int16(0), part, address)


# By the type of the blocks.
ATTEND: dict[np.dtype, Kernel] = {
    np.dtype(np.float32): attend_float32,
    np.dtype(np.uint16): attend_bfloat16,
    np.dtype(np.int16): attend_float16,
}


@jit_function
def _attend_part(element, part, address):
    """Attend to a part's blocks, in the order of memory: all heads of a block before the next one."""
    call, stored = call_at(address, AttentionCall), stored_at(address)
    hidden = stored.hidden // BLOCK
    blocks = (stored.num_tokens + BLOCK - 1) // BLOCK - stored.quantized_blocks - hidden
    items = share(part, call.parts - call.quantized_parts, blocks * stored.heads)
    part += call.quantized_parts
    start_part(part, items, address)
    for item in range(items.start + hidden * stored.heads, items.stop + hidden * stored.heads):
        block = item // stored.heads
        start = (block if block < stored.first_quantized else block + stored.quantized_blocks) * BLOCK
        _attend_block(element, part, item, item - block * stored.heads, start, address)


@jit_inlined
def share(part, parts, items):
    """The items of one part, if `parts` equal parts share all items."""
    return range(part * items // parts, (part + 1) * items // parts)


@jit_function
def start_part(part, items, address):
    """Reset the rows of the heads that have a block in a part. The others get NaN as their maximum."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    memory, rows = part * scratch.part_bytes, call.rows_at_once
    maxima = floats_at(scratch.maxima + memory, stored.heads * rows)
    for row in range(maxima.size):
        maxima[row] = np.nan
    for item in range(items.start, min(items.stop, items.start + stored.heads)):
        first = item % stored.heads * rows
        reset_rows(first, rows, scratch.maxima + memory, scratch.sums + memory, scratch.partial + memory, stored.width)


@jit_inlined
def has_mask(address):
    call = call_at(address, AttentionCall)
    return call.visible != 0 or call.bias != 0


@jit_function
def _attend_block(element, part, item, head, start, address):
    """Attend to block number `item`, which begins at token `start`, with all rows of its head."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    memory, tokens = part * scratch.part_bytes, min(BLOCK, stored.num_tokens - start)
    keys, values = stored.keys + item * stored.key_bytes, stored.values + item * stored.value_bytes
    scores, corrections = scratch.scores + memory, scratch.corrections + memory
    for first in range(0, call.rows_at_once, ROWS):
        row = head * call.rows_at_once + first
        ranges, is_masked = 0, has_mask(address) or tokens < BLOCK or start < stored.hidden
        if call.seen:
            ranges = scratch.ranges + row * 16
            is_seen, is_whole = shows(ranges, start)
            if not is_seen:
                continue
            is_masked = is_masked or not is_whole
        stride = row_bytes(call.operand_is_bfloat16, address)
        query = scratch.operand + row * stride
        if call.operand_is_bfloat16:
            score_bfloat16(element, query, stride, keys, stored.key_dim, scores, values)
        else:
            score(element, query, stride, keys, stored.key_dim, scores, values)
        factor = score_factor(address)
        if call.cap:
            cap_tile(scores, factor, address)
            factor = numba.float32(1)
        if is_masked:
            mask_tile(head, first, start, ranges, scores, factor, address)
            factor = numba.float32(1)
        state = memory + row * 4
        softmax_tile(scores, factor, scratch.maxima + state, scratch.sums + state, corrections)
        partial = scratch.partial + memory + row * stored.width * 4
        weigh(element, scores, values, tokens, stored.width, corrections, partial, keys + stored.key_bytes)


@jit
def merge_head(head, address):
    """Write the results of a head's rows from all parts."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    row = head * call.rows_at_once
    maxima, sums, partial = scratch.maxima + row * 4, scratch.sums + row * 4, scratch.partial + row * stored.width * 4
    merge_rows(head, 0, call.rows, call.parts, call.quantized_parts, maxima, sums, partial, scratch.part_bytes, address)


def attention_kernels(element: np.dtype) -> list[Needed]:
    """The kernels by which few queries attend to blocks of `element`."""
    return [(kernel, taking_numbers(kernel)) for kernel in (take_queries, ATTEND[element], merge_head)]
