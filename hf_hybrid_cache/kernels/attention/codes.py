"""
Attention of a few queries over quantized blocks in host memory, with blocks in full precision before and after them.

The steps are those of `attention`; products use the codes themselves. Several blocks take each step side by side: the
processor then works on the others while a step of one waits for the step before it.
"""

import numba

from ..vector.code_tiles import MOST_BITS_OF_QUADS, score_codes, weigh_codes
from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.intrinsics import call_at, prefetch_lines
from ..vector.numbers_at import integers_at
from ..vector.tiles import ROWS, softmax_codes
from ..vector.vector_ir import BLOCK, CACHE_LINE
from .attention import has_mask, share, start_part
from .attention_call import (
    AttentionCall,
    cap_tile,
    factor_of,
    key_layout,
    mask_tile,
    scratch_at,
    stored_at,
    value_layout,
)
from .folding import fold_rows

BLOCKS_AT_ONCE = 4
# The numbers of each of the blocks side by side: its head, its first token, the addresses of its codes, and those of
# the codes that are attended to next.
_HEAD, _START, _KEYS, _VALUES, _NEXT_KEYS, _NEXT_VALUES = range(6)
_NUMBERS = 6
BLOCKS_BYTES = 8 * BLOCKS_AT_ONCE * _NUMBERS
_LINE_SCALES = CACHE_LINE // 2  # bfloat16 scales in a cache line


@jit
def attend_codes(part, address):
    """Attend to a part's quantized blocks, in the order of memory: all heads of a block before the next one."""
    call, stored = call_at(address, AttentionCall), stored_at(address)
    keys, values, memory = key_layout(address), value_layout(address), part * scratch_at(address).part_bytes
    items = share(part, call.quantized_parts, stored.quantized_blocks * stored.heads)
    start_part(part, items, address)
    for first in range(items.start, items.stop, BLOCKS_AT_ONCE):
        count = min(BLOCKS_AT_ONCE, items.stop - first)
        _place_blocks(first, count, items.stop - 1, memory, address)
        for row in range(0, call.rows_at_once, ROWS):
            for group in range(keys.groups):
                _fold(count, row, group, True, memory, address)
                _score(count, group, memory, address)
            _weigh(count, row, memory, address)
            for group in range(values.groups):
                _fold(count, row, group, False, memory, address)
                _add_values(count, row, group, memory, address)


@jit_inlined
def _place_blocks(first, count, last, memory, address):
    """Note the blocks, from number `first` on, that are attended to side by side. Number `last` is the part's last."""
    stored, blocks = stored_at(address), _blocks(memory, address)
    key_bytes, value_bytes = key_layout(address).num_bytes, value_layout(address).num_bytes
    for which in range(count):
        item = first + which
        block, following = item // stored.heads, min(item + BLOCKS_AT_ONCE, last)
        blocks[which, _HEAD] = item - block * stored.heads
        blocks[which, _START] = (stored.first_quantized + block) * BLOCK
        blocks[which, _KEYS] = stored.packed_keys + item * key_bytes
        blocks[which, _VALUES] = stored.packed_values + item * value_bytes
        blocks[which, _NEXT_KEYS] = stored.packed_keys + following * key_bytes
        blocks[which, _NEXT_VALUES] = stored.packed_values + following * value_bytes


@jit_inlined
def _blocks(memory, address):
    scratch = scratch_at(address)
    return integers_at(scratch.blocks + memory, (BLOCKS_AT_ONCE, _NUMBERS))


@jit_function
def _fold(count, row, group, of_keys, memory, address):
    """
    Fold scales and minima of a group of keys into the queries, or of values into the weights.

    It prefetches those of the blocks that come next.
    """
    call, stored, scratch = call_at(address, AttentionCall), stored_at(address), scratch_at(address)
    form, blocks = key_layout(address) if of_keys else value_layout(address), _blocks(memory, address)
    limit = form.limit if call.rounds_to_integers else 0
    is_quad = limit > 0 and form.bits <= MOST_BITS_OF_QUADS
    middle = numba.float32(((1 << form.bits) - 1) * 0.5 if is_quad else 0)
    factor = factor_of(address) if of_keys else numba.float32(1)
    stride, at = stored.inner * 4 if of_keys else BLOCK * 4, form.scales + group * form.inner * 2
    for which in range(count):
        scales = blocks[which, _KEYS if of_keys else _VALUES] + at
        _prefetch_scales(blocks[which, _NEXT_KEYS if of_keys else _NEXT_VALUES] + at, form)
        rows, of_rows = scratch.scores + memory + which * ROWS * BLOCK * 4, memory + which * ROWS * 4
        if of_keys:
            rows = scratch.rotated + (blocks[which, _HEAD] * call.rows_at_once + row) * stride
        fold_rows(
            rows, stride, scales, scales + form.minima, form.inner, form.bits, middle, limit, factor,
            scratch.folded + memory, scratch.rounded + memory + which * scratch.rounded_bytes,
            scratch.steps + of_rows, scratch.constants + of_rows,
        )  # fmt: skip


@jit_inlined
def _prefetch_scales(scales, form):
    """Prefetch the scales and minima of a group."""
    for first in range(0, form.inner, _LINE_SCALES):
        prefetch_lines(scales + first * 2, 1)
        prefetch_lines(scales + form.minima + first * 2, 1)


@jit_function
def _score(count, group, memory, address):
    """Write the scores of a group's tokens, and prefetch the next keys."""
    call, scratch, form = call_at(address, AttentionCall), scratch_at(address), key_layout(address)
    blocks, first, end = _blocks(memory, address), group * form.group, min((group + 1) * form.group, BLOCK)
    for which in range(count):
        of_rows = memory + which * ROWS * 4
        score_codes(
            form.bits, call.rounds_to_integers != 0, scratch.rounded + memory + which * scratch.rounded_bytes,
            blocks[which, _KEYS], form.inner, first, end, scratch.steps + of_rows, scratch.constants + of_rows,
            scratch.scores + memory + which * ROWS * BLOCK * 4, blocks[which, _NEXT_KEYS],
        )  # fmt: skip


@jit_function
def _weigh(count, row, memory, address):
    """Turn scores into weights, one block after the other, as blocks of the same head share their maxima and sums."""
    call, scratch = call_at(address, AttentionCall), scratch_at(address)
    blocks, one = _blocks(memory, address), numba.float32(1)
    for which in range(count):
        head, scores = blocks[which, _HEAD], scratch.scores + memory + which * ROWS * BLOCK * 4
        if call.cap:
            cap_tile(scores, one, address)
        if has_mask(address):
            mask_tile(head, row, blocks[which, _START], 0, scores, one, address)
        state, corrections = memory + (head * call.rows_at_once + row) * 4, scratch.corrections + memory
        softmax_codes(scores, one, scratch.maxima + state, scratch.sums + state, corrections + which * ROWS * 4)


@jit_function
def _add_values(count, row, group, memory, address):
    """Correct a group's channels in the partial results, add the weighted values, and prefetch the next values."""
    call, stored, scratch, form = (
        call_at(address, AttentionCall),
        stored_at(address),
        scratch_at(address),
        value_layout(address),
    )
    blocks, first, end = _blocks(memory, address), group * form.group, min((group + 1) * form.group, form.lanes)
    for which in range(count):
        of_rows, at = memory + which * ROWS * 4, blocks[which, _HEAD] * call.rows_at_once + row
        weigh_codes(
            form.bits, call.rounds_to_integers != 0, scratch.rounded + memory + which * scratch.rounded_bytes,
            blocks[which, _VALUES], form.inner, form.lanes, first, end, scratch.steps + of_rows,
            scratch.constants + of_rows, scratch.corrections + of_rows,
            scratch.partial + memory + at * stored.width * 4, blocks[which, _NEXT_VALUES],
        )  # fmt: skip


def quantized_attention_kernels() -> list[Needed]:
    """The kernel by which few queries attend to quantized blocks."""
    return [(attend_codes, taking_numbers(attend_codes))]
