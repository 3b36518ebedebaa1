"""
Attention of a few queries over blocks in full precision in host memory, in operations on an `AttentionCall`.

It makes one pass with a running maximum (arXiv:1805.02867). A part is some blocks of a sequence (Flash-Decoding), with
all heads, in the order of memory; partial results are merged by log-sum-exp in float64. Each key and value is read
once, whatever the number of queries and of query heads. A row's result depends on no other row: neither parts nor the
order of sums do. Sequences of about the same length have the same whole parts, so those whose first blocks are the same
have them computed by one call for the rows of all, with the bits that each has alone.
"""

from typing import Any

import numba
import numpy as np

from ..vector.compiled import Kernel, Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import call_at
from ..vector.numbers_at import keep
from ..vector.tiles import ROWS, score, score_bfloat16, softmax_tile, weigh
from ..vector.vector_ir import BLOCK, CACHE_LINE
from .attention_call import (
    AttentionCall,
    cap_tile,
    mask_tile,
    merge_rows,
    reset_rows,
    results_of,
    row_bytes,
    score_factor,
    scratch_at,
    shows,
    stored_at,
    take_ranges,
    take_rows,
)

# Blocks of a part. With fewer, starting the part and merging its result would take time beside them; float32 sums over
# more would lose digits: those of parts are added in float64.
_FEWEST_BLOCKS, _MOST_BLOCKS = 3, 32
# Many blocks have a multiple of so many whole parts, which most numbers of threads share equally.
_PARTS = 12


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
    """Attend to a part's blocks."""
    call, stored = call_at(address, AttentionCall), stored_at(address)
    hidden = stored.hidden // BLOCK
    blocks = (stored.num_tokens + BLOCK - 1) // BLOCK - stored.quantized_blocks - hidden
    parts, begin = call.parts - call.quantized_parts, 0 if stored.quantized_blocks else call.first_part
    first, of_part, memory = begin_part(part, call.quantized_parts, parts, begin, blocks, address)
    work = working_memory(address)
    place = first_line(work)
    for block in of_part:
        for head in range(stored.num_kv_heads):
            _attend_block(element, hidden + block, first, head, memory, place, address)
    keep(work)


@jit_inlined
def begin_part(part, before, parts, begin, blocks, address):
    """
    Reset the rows of one of the `parts` of each sequence, of those that its `blocks` are divided into.

    Returns the first head of the sequence, the numbers of the part's blocks, and the offset of its memory.

    before: parts of the sequence whose memory comes before that of these; begin: the first of these parts.
    """
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    sequence = part // parts
    part -= sequence * parts
    memory = (sequence * call.parts + before + part) * scratch.part_bytes
    rows = stored.num_kv_heads * call.rows_at_once
    reset_rows(0, rows, scratch.maxima + memory, scratch.sums + memory, scratch.partial + memory, stored.width)
    size, whole, others = division(blocks)
    part += begin
    if part < whole:
        return sequence * stored.num_kv_heads, range(part * size, (part + 1) * size), memory
    rest, part = blocks - whole * size, part - whole
    start, end = part * rest // others, (part + 1) * rest // others
    return sequence * stored.num_kv_heads, range(whole * size + start, whole * size + end), memory


def _division(blocks):
    """
    The parts of some blocks of a sequence: blocks of a whole part, whole parts, and others that share the rest.

    Neither threads nor other sequences and queries count: the sums of a row have one order, whatever comes with it.
    """
    most = _PARTS * ((blocks + _PARTS * _MOST_BLOCKS - 1) // (_PARTS * _MOST_BLOCKS))
    size = max(_FEWEST_BLOCKS, blocks // max(most, 1))
    # In steps, so that sequences of about the same length have the same whole parts.
    size -= size % (4 if size >= 16 else 2 if size >= 8 else 1)
    whole = min(most, blocks // size)
    rest = blocks - whole * size
    return size, whole, 2 * ((rest + 2 * size - 1) // (2 * size)) if rest > _FEWEST_BLOCKS else min(rest, 1)


division: Any = jit_function(_division)


@jit_inlined
def place_ahead(place, head, ahead, address):
    """
    The place, in the order of memory, of what a part attends to next but `ahead`.

    place: `block * heads + head` of a block and one of all heads; head: the same one, of those of its sequence.
    """
    stored = stored_at(address)
    following = place + ahead
    if stored.heads != stored.num_kv_heads:
        following += (head + ahead) // stored.num_kv_heads * (stored.heads - stored.num_kv_heads)
    return following


@jit_inlined
def working_memory(address):
    """Memory that a part works in, to be kept, from its first whole cache line on."""
    return np.empty(scratch_at(address).work_bytes + CACHE_LINE, np.uint8)


@jit_inlined
def first_line(memory):
    """The address of the first whole cache line."""
    return (np.int64(memory.ctypes.data) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@jit_inlined
def has_mask(address):
    call = call_at(address, AttentionCall)
    return call.visible != 0 or call.bias != 0


@jit_inlined
def shown(head, row, start, address):
    """
    Return what four rows of a head, from `row` on, see of the block that begins at token `start`.

    It is the address of their ranges, or 0; whether one of them sees any of it; and whether anything may be hidden.
    """
    call = call_at(address, AttentionCall)
    if not call.seen:
        return np.int64(0), True, has_mask(address) or start < stored_at(address).hidden
    ranges = scratch_at(address).ranges + (head * call.rows_at_once + row) * 16
    is_seen, is_whole = shows(ranges, start)
    return ranges, is_seen, not is_whole or has_mask(address)


@jit_function
def _attend_block(element, block, first, head, memory, work, address):
    """Attend to a block in full precision with all rows of a head of the sequence that has the head `first`."""
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    start = (block if block < stored.first_quantized else block + stored.quantized_blocks) * BLOCK
    tokens, place = min(BLOCK, stored.num_tokens - start), block * stored.heads + first + head
    keys, values = stored.keys + place * stored.key_bytes, stored.values + place * stored.value_bytes
    next_keys = stored.keys + place_ahead(place, head, 1, address) * stored.key_bytes
    scores, corrections = work + scratch.scores, work + scratch.corrections
    for row in range(0, call.rows_at_once, ROWS):
        ranges, is_seen, is_masked = shown(first + head, row, start, address)
        if not is_seen:
            continue
        stride = row_bytes(call.operand_is_bfloat16, address)
        query = scratch.operand + ((first + head) * call.rows_at_once + row) * stride
        if call.operand_is_bfloat16:
            score_bfloat16(element, query, stride, keys, stored.key_dim, scores, values)
        else:
            score(element, query, stride, keys, stored.key_dim, scores, values)
        factor = score_factor(address)
        if call.cap:
            cap_tile(scores, factor, address)
            factor = numba.float32(1)
        if is_masked or tokens < BLOCK:
            mask_tile(first + head, row, start, ranges, scores, factor, address)
            factor = numba.float32(1)
        of_part = head * call.rows_at_once + row
        state, partial = memory + of_part * 4, scratch.partial + memory + of_part * stored.width * 4
        softmax_tile(scores, factor, scratch.maxima + state, scratch.sums + state, corrections)
        weigh(element, scores, values, tokens, stored.width, corrections, partial, next_keys)


@jit
def merge_head(head, address):
    """Write the results of a head's rows from all parts."""
    merge_rows(head, 0, call_at(address, AttentionCall).rows, results_of(head, 0, address), address)


def attention_kernels(element: np.dtype) -> list[Needed]:
    """The kernels by which few queries attend to blocks of `element`."""
    return [(kernel, taking_numbers(kernel)) for kernel in (take_queries, ATTEND[element], merge_head)]
