"""
Attention of a few queries to several quantized blocks side by side, one block in each slot.

All slots take a step before any takes the next. The processor then works on other slots while a step waits for the step
before it, and a function gets its many arguments once for all slots.
"""

from typing import NamedTuple

import numba

from ..blocks import BLOCK
from ..quantized.folding import (
    MOST_BITS_OF_QUADS,
    SLOTS,
    find_constants,
    find_steps,
    fold_rows,
    middle_of_codes,
    round_rows,
)
from ..quantized.quantized_tiles import (
    score_narrow_quantized_tile,
    score_quantized_tile,
    weigh_narrow_quantized_tile,
    weigh_quantized_tile,
)
from ..vector.compiled import jit_function, jit_inlined
from ..vector.prefetching import prefetch_bytes, prefetch_lines
from ..vector.tiles import ROWS, pointer, tile_columns
from ..vector.vector_ir import CACHE_LINE, LANES
from .attention import mask_scores
from .page_tiles import PAGE, hide_pages
from .slot_softmax import (
    add_lanes,
    add_up_weights,
    copy_four,
    correct_nothing,
    raise_lanes,
    raise_maxima,
    start_softmax,
    weigh_and_fold_scores,
    weigh_scores,
)

# The numbers of a slot: the head, the first slot of that head, the first token of the block, the first and the end of
# its tokens to attend to, and the addresses of the packed blocks; then tokens and addresses of the slot's next block.
_HEAD, _LEADER, _START, _FIRST, _END, _KEYS, _VALUES, _NEXT_FIRST, _NEXT_END, _NEXT_KEYS, _NEXT_VALUES = range(11)
SLOT_NUMBERS = 11
# Arrays with a number for each row of the slots, and arrays with a number for each lane of each row, see `Scratch`.
ROW_NUMBERS, LANE_NUMBERS = 5, 4
_LINE_SCALES = CACHE_LINE // 2  # bfloat16 scales in a cache line


class Form(NamedTuple):
    """The form of the packed blocks of keys, or of values."""

    bits: int
    limit: int  # see `fold_rows`
    middle: float  # see `fold_rows`
    inner: int
    lanes: int
    group: int
    groups: int
    scales: int  # bytes before the scales in a packed block
    packed: int  # address of the first packed block
    packed_block: int  # bytes of one


class Scratch(NamedTuple):
    """Addresses of a segment's scratch memory, of the first slot."""

    rotated: int  # the rotated query, only read
    slots: int  # int64 [SLOTS, SLOT_NUMBERS]
    folded: int  # float32 [SLOTS, ROWS, longest inner axis]
    operand: int  # float32 or integers [SLOTS, ROWS, longest inner axis]
    operand_bytes: int  # from a slot to the next, in `folded` and in `operand`
    steps: int  # this and the next four: float32 [SLOTS, ROWS]
    factors: int
    constants: int
    maxima: int
    sums: int
    highest: int  # this and the next three: float32 [SLOTS, ROWS, LANES]
    weights: int
    added: int
    totals: int


@jit_inlined
def forms_of(segment, call):
    """The forms of keys and of values, and the scratch memory of a segment."""
    inner, width = call.query.shape[2], call.partial.shape[3]
    key_limit = _limit(inner, call.key_bits, 127) if call.is_integer else 0
    value_limit = _limit(BLOCK, call.value_bits, 255) if call.is_integer else 0
    keys, key_bytes = call.packed_keys.ctypes.data, call.packed_keys.shape[2]
    values, value_bytes = call.packed_values.ctypes.data, call.packed_values.shape[2]
    return (
        _form(call.key_bits, key_limit, inner, BLOCK, call.key_group, keys, key_bytes),
        _form(call.value_bits, value_limit, BLOCK, width, call.value_group, values, value_bytes),
        Scratch(
            rotated=call.rotated.ctypes.data,
            slots=call.slots[segment].ctypes.data,
            folded=call.operands[segment, 0].ctypes.data,
            operand=call.operands[segment, 1].ctypes.data,
            operand_bytes=call.operands[segment, 0, 0].nbytes,
            steps=call.row_numbers[segment, 0].ctypes.data,
            factors=call.row_numbers[segment, 1].ctypes.data,
            constants=call.row_numbers[segment, 2].ctypes.data,
            maxima=call.row_numbers[segment, 3].ctypes.data,
            sums=call.row_numbers[segment, 4].ctypes.data,
            highest=call.lane_numbers[segment, 0].ctypes.data,
            weights=call.lane_numbers[segment, 1].ctypes.data,
            added=call.lane_numbers[segment, 2].ctypes.data,
            totals=call.lane_numbers[segment, 3].ctypes.data,
        ),
    )


@jit_inlined
def _form(bits, limit, inner, lanes, group, packed, packed_block):
    groups, scales = (lanes + group - 1) // group, inner * bits // 8 * lanes
    return Form(
        bits=bits,
        limit=limit,
        middle=middle_of_codes(bits, limit),
        inner=inner,
        lanes=lanes,
        group=group,
        groups=groups,
        scales=scales,
        packed=packed,
        packed_block=packed_block,
    )


@jit_function
def _limit(inner, bits, byte):
    """The largest integer to round to: `byte` for 2 and 4 bits; else sums of products with codes fit 32 bits."""
    return byte if bits <= MOST_BITS_OF_QUADS else min(32767, (2**31 - 1) // ((2**bits - 1) * inner))


@jit_inlined
def put_into_slot(slot, item, head, start, tokens, following, next_tokens, key_form, value_form, at):
    """
    Put a block of a head into a slot.

    item: number of the block; start: its first token; tokens: the first and the end of its tokens to attend to,
    multiples of 16; following, next_tokens: number and tokens of the next block in this slot.
    """
    numbers = _slots(at)
    leader = slot
    for other in range(slot - 1, -1, -1):
        if numbers[other, _HEAD] == head:
            leader = other
    numbers[slot, _HEAD], numbers[slot, _LEADER], numbers[slot, _START] = head, leader, start
    numbers[slot, _FIRST], numbers[slot, _END] = tokens
    numbers[slot, _KEYS] = key_form.packed + item * key_form.packed_block
    numbers[slot, _VALUES] = value_form.packed + item * value_form.packed_block
    numbers[slot, _NEXT_FIRST], numbers[slot, _NEXT_END] = next_tokens
    numbers[slot, _NEXT_KEYS] = key_form.packed + following * key_form.packed_block
    numbers[slot, _NEXT_VALUES] = value_form.packed + following * value_form.packed_block


@jit_inlined
def _slots(at):
    return numba.carray(pointer(at.slots, numba.int64(0)), (SLOTS, SLOT_NUMBERS))


@jit_inlined
def attend_slots(count, plan, key_form, value_form, at):
    """Attend to the blocks in the first `count` slots, as `attend_block` does."""
    for row in range(0, plan.rows, ROWS):
        for group in range(key_form.groups):
            _fold_scales_of_keys(count, row, group, plan, key_form, at)
            _score(count, group, plan, key_form, at)
        _weigh_scores(count, row, plan, value_form, at)
        for group in range(value_form.groups):
            _fold_scales_of_values(count, group, plan, value_form, at)
            _add_values(count, row, group, plan, value_form, at)


@jit_inlined
def _fold_scales_of_keys(count, row, group, plan, form, at):
    """Fold scales and minima of a group of keys into the query, and prefetch the next ones."""
    slots = _slots(at)
    for slot in range(count):
        _prefetch_scales_of_keys(slots[slot, _NEXT_KEYS], group, form)
        if row == 0 and group == 0:
            _prefetch_half(slot, _NEXT_KEYS, 0, slots, form)
        query = at.rotated + (slots[slot, _HEAD] * plan.rows + row) * plan.query_bytes
        scales = slots[slot, _KEYS] + form.scales + group * form.inner * 2
        _fold(slot, query, plan.query_bytes, scales, form.inner, form, at)
    if form.limit > 0:
        find_steps(form.limit, at.highest, at.steps, at.factors)
        for slot in range(count):
            _round(slot, form.inner, form, at)
    find_constants(form.middle, form.limit, at.added, at.totals, plan.factor, at.steps, at.constants)


@jit_inlined
def _fold_scales_of_values(count, group, plan, form, at):
    """Fold scales and minima of a group of values into the weights, and prefetch the next ones."""
    slots = _slots(at)
    for slot in range(count):
        first, end = slots[slot, _FIRST], slots[slot, _END]
        _prefetch_scales_of_values(
            slots[slot, _NEXT_VALUES], slots[slot, _NEXT_FIRST], slots[slot, _NEXT_END], group, form
        )
        if not _is_folded_with_weights(slot, slots, form):
            weights = plan.scores + (slot * ROWS * BLOCK + first) * 4
            scales = slots[slot, _VALUES] + form.scales + (group * form.inner + first) * 2
            _fold(slot, weights, BLOCK * 4, scales, end - first, form, at)
    if form.limit > 0:
        find_steps(form.limit, at.highest, at.steps, at.factors)
        for slot in range(count):
            _round(slot, slots[slot, _END] - slots[slot, _FIRST], form, at)
    find_constants(form.middle, form.limit, at.added, at.totals, numba.float32(1), at.steps, at.constants)


@jit_inlined
def _fold(slot, rows, row_bytes, scales, length, form, at):
    """Fold scales, and the minima beside them, into the rows of a slot."""
    operands, lanes = slot * at.operand_bytes, slot * ROWS * LANES * 4
    fold_rows(
        rows, row_bytes, scales, scales + form.groups * form.inner * 2, length, form.middle, form.limit,
        at.folded + operands, at.operand + operands, at.highest + lanes, at.added + lanes,
    )  # fmt: skip


@jit_inlined
def _round(slot, length, form, at):
    operands, rows = slot * at.operand_bytes, slot * ROWS * 4
    round_rows(
        at.folded + operands, length, form.bits, at.factors + rows, at.operand + operands, at.totals + rows * LANES
    )


@jit_function
def _score(count, group, plan, form, at):
    """Write the scores of a group's tokens, and prefetch the next keys."""
    slots = _slots(at)
    for slot in range(count):
        packed_block, first, end = slots[slot, _KEYS], slots[slot, _FIRST], slots[slot, _END]
        ahead = slots[slot, _NEXT_KEYS]
        if not _are_whole(slot, slots):
            _prefetch_tokens_of_keys(ahead, slots[slot, _NEXT_FIRST], slots[slot, _NEXT_END], form)
            ahead = packed_block
        operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * ROWS * 4
        constants, corrections = at.constants + slot * ROWS * 4, plan.corrections + slot * ROWS * 4
        scores = plan.scores + slot * ROWS * BLOCK * 4
        column, end = max(first, group * form.group), min(end, (group + 1) * form.group)
        while column + tile_columns() <= end:
            score_quantized_tile(
                form.bits, form.limit > 0, operand, packed_block, form.inner, form.lanes, column, steps, constants,
                corrections, scores, BLOCK * 4, ahead,
            )  # fmt: skip
            column += tile_columns()
        while column < end:
            score_narrow_quantized_tile(
                form.bits, form.limit > 0, operand, packed_block, form.inner, form.lanes, column, steps, constants,
                corrections, scores, BLOCK * 4, ahead,
            )  # fmt: skip
            column += 16


@jit_inlined
def _weigh_scores(count, row, plan, form, at):
    """
    Turn scores into weights.

    Slots of the same head share their maxima. The first of them holds the sums of the rows and corrects their partial
    results.
    """
    slots = _slots(at)
    for slot in range(count):
        scores = plan.scores + slot * ROWS * BLOCK * 4
        if not _are_whole(slot, slots):
            _prefetch_tokens_of_values(
                slots[slot, _NEXT_VALUES], slots[slot, _NEXT_FIRST], slots[slot, _NEXT_END], form
            )
            hide_pages(scores, slots[slot, _FIRST] // PAGE, slots[slot, _END] // PAGE)
        if row == 0:
            _prefetch_half(slot, _NEXT_VALUES, 0, slots, form)
        mask_scores(slots[slot, _HEAD], row, slots[slot, _START], scores, numba.float32(1), plan)
        state, rows = (slots[slot, _HEAD] * plan.rows + row) * 4, slot * ROWS * 4
        highest = at.highest + rows * LANES
        start_softmax(scores, plan.maxima + state, plan.sums + state, highest, at.maxima + rows, at.sums + rows)
        if slots[slot, _LEADER] < slot:
            raise_lanes(highest, at.highest + slots[slot, _LEADER] * ROWS * LANES * 4)
    raise_maxima(at.highest, at.maxima, plan.corrections)
    for slot in range(count):
        state, rows = (slots[slot, _HEAD] * plan.rows + row) * 4, slot * ROWS * 4
        if row == 0:
            _prefetch_half(slot, _NEXT_VALUES, 1, slots, form)
        leader, weights = slots[slot, _LEADER] * ROWS * 4, at.weights + rows * LANES
        scores, maxima = plan.scores + rows * BLOCK, plan.maxima + state
        if _is_folded_with_weights(slot, slots, form):
            scales, lanes = slots[slot, _VALUES] + form.scales, rows * LANES
            weigh_and_fold_scores(
                scores, at.maxima + leader, maxima, weights, scales, scales + form.inner * 2, form.middle,
                at.folded + slot * at.operand_bytes, at.highest + lanes, at.added + lanes,
            )  # fmt: skip
        else:
            weigh_scores(scores, at.maxima + leader, maxima, weights)
        if leader < rows:
            add_lanes(weights, at.weights + leader * LANES)
            correct_nothing(plan.corrections + rows)
    add_up_weights(at.weights, plan.corrections, at.sums)
    for slot in range(count):
        if slots[slot, _LEADER] == slot:
            copy_four(at.sums + slot * ROWS * 4, plan.sums + (slots[slot, _HEAD] * plan.rows + row) * 4)


@jit_function
def _add_values(count, row, group, plan, form, at):
    """Correct a group's channels in the partial results, add the weighted values, and prefetch the next values."""
    slots = _slots(at)
    for slot in range(count):
        packed_block, first, end = slots[slot, _VALUES], slots[slot, _FIRST], slots[slot, _END]
        ahead = slots[slot, _NEXT_VALUES] if _are_whole(slot, slots) else packed_block
        operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * ROWS * 4
        constants, corrections = at.constants + slot * ROWS * 4, plan.corrections + slot * ROWS * 4
        target = plan.partial + (slots[slot, _HEAD] * plan.rows + row) * plan.width * 4
        words, length = packed_block + first * form.bits // 8 * form.lanes, end - first
        column, last = group * form.group, min((group + 1) * form.group, form.lanes)
        while column + tile_columns() <= last:
            weigh_quantized_tile(
                form.bits, form.limit > 0, operand, words, length, form.lanes, column, steps, constants, corrections,
                target, form.lanes * 4, ahead,
            )  # fmt: skip
            column += tile_columns()
        while column < last:
            weigh_narrow_quantized_tile(
                form.bits, form.limit > 0, operand, words, length, form.lanes, column, steps, constants, corrections,
                target, form.lanes * 4, ahead,
            )  # fmt: skip
            column += 16


@jit_inlined
def _is_folded_with_weights(slot, slots, form):
    """Whether scales and minima of values are folded into the weights while those are computed."""
    return form.limit > 0 and form.groups == 1 and slots[slot, _END] - slots[slot, _FIRST] == BLOCK


@jit_inlined
def _are_whole(slot, slots):
    """Whether a slot's block and its next block are attended to as a whole. Products then prefetch the next block."""
    now = slots[slot, _END] - slots[slot, _FIRST]
    return min(now, slots[slot, _NEXT_END] - slots[slot, _NEXT_FIRST]) == BLOCK


@jit_inlined
def _prefetch_half(slot, packed_block, half, slots, form):
    """
    Prefetch half of the codes of the next packed block, before products prefetch all of them once more.

    The processor drops some of many requests at a time. Codes of fewer bits come from memory faster than the products
    use them, and need no such prefetch.
    """
    if form.bits > MOST_BITS_OF_QUADS and _are_whole(slot, slots):
        prefetch_bytes(slots[slot, packed_block] + half * form.scales // 2, form.scales // 2)


@jit_function
def _prefetch_tokens_of_keys(packed_block, first, end, form):
    for word in range(form.inner * form.bits // 32):
        prefetch_bytes(packed_block + (word * BLOCK + first) * 4, (end - first) * 4)


@jit_function
def _prefetch_tokens_of_values(packed_block, first, end, form):
    token_bytes = form.lanes * form.bits // 8
    prefetch_bytes(packed_block + first * token_bytes, (end - first) * token_bytes)


@jit_inlined
def _prefetch_scales_of_keys(packed_block, group, form):
    """Prefetch the scales and minima of a group of keys."""
    for first in range(0, form.inner, _LINE_SCALES):
        scales = packed_block + form.scales + (group * form.inner + first) * 2
        prefetch_lines(scales, 1)
        prefetch_lines(scales + form.groups * form.inner * 2, 1)


@jit_inlined
def _prefetch_scales_of_values(packed_block, first, end, group, form):
    """Prefetch the scales and minima of a group of values, for the tokens from `first` to `end`."""
    scales = packed_block + form.scales + (group * form.inner + first) * 2
    minima = scales + form.groups * form.inner * 2
    if end - first == BLOCK:
        prefetch_lines(scales, 2)
        prefetch_lines(minima, 2)
    else:
        prefetch_lines(scales, 1)
        prefetch_lines(minima, 1)
