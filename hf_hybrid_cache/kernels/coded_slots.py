"""
Attention of a few queries to coded blocks side by side, in slots: all take a step before any takes the next.

So a step waits for the one before it of the same block only, and a function gets its many arguments once for all slots.
"""

from typing import NamedTuple

import numba

from .attention import mask_scores
from .blocks import BLOCK
from .coded_tiles import score_coded_tile, score_narrow_coded_tile, weigh_coded_tile, weigh_narrow_coded_tile
from .compiled import jit_inlined, jit_part
from .folding import MOST_BITS_OF_QUADS, SLOTS, find_constants, find_steps, fold_rows, middle_of_codes, round_rows
from .page_tiles import PAGE, hide_pages
from .prefetching import prefetch_bytes, prefetch_lines
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
from .tiles import ROWS, pointer, tile_columns
from .vector_ir import CACHE_LINE, LANES

# What the numbers of a slot are: the head, the first slot of that head, the block's first token, which of its tokens
# are attended to, the addresses of the two records, and the same of what comes into the slot next.
_HEAD, _LEADER, _START, _FIRST, _END, _KEYS, _VALUES, _NEXT_FIRST, _NEXT_END, _NEXT_KEYS, _NEXT_VALUES = range(11)
SLOT_NUMBERS = 11
# Arrays of a number for each row of the slots, and of one for each lane of each row, see `Scratch`.
ROW_NUMBERS, LANE_NUMBERS = 5, 4
_LINE_SCALES = CACHE_LINE // 2  # of bfloat16, in a cache line


class Form(NamedTuple):
    """How the records of keys, or of values, are taken apart; plain numbers."""

    bits: int
    limit: int  # of `fold_rows`, as the next
    middle: float
    inner: int
    lanes: int
    group: int
    groups: int
    scales: int  # where they start in a record
    records: int  # address
    record: int  # bytes


class Scratch(NamedTuple):
    """Addresses of what a segment writes and reads again for each tile: those of the first slot."""

    rotated: int  # not written: the query
    slots: int  # int64 [SLOTS, SLOT_NUMBERS]
    folded: int  # float32 [SLOTS, ROWS, longest inner axis]
    operand: int  # likewise, or integers
    operand_bytes: int  # from a slot to the next, of either
    steps: int  # float32 [SLOTS, ROWS], as those up to `sums`
    factors: int
    constants: int
    maxima: int
    sums: int
    highest: int  # float32 [SLOTS, ROWS, LANES], as those after it
    weights: int
    added: int
    totals: int


@jit_inlined
def forms_of(segment, call):
    """How keys and values are taken apart, and where a segment writes meanwhile."""
    inner, width = call.query.shape[2], call.partial.shape[3]
    key_limit = _limit(inner, call.key_bits, 127) if call.is_integer else 0
    value_limit = _limit(BLOCK, call.value_bits, 255) if call.is_integer else 0
    keys, key_bytes = call.key_records.ctypes.data, call.key_records.shape[2]
    values, value_bytes = call.value_records.ctypes.data, call.value_records.shape[2]
    return (
        _form(call.key_bits, key_limit, inner, BLOCK, call.key_group, keys, key_bytes),
        _form(call.value_bits, value_limit, BLOCK, width, call.value_group, values, value_bytes),
        Scratch(
            call.rotated.ctypes.data,
            call.slots[segment].ctypes.data,
            call.operands[segment, 0].ctypes.data,
            call.operands[segment, 1].ctypes.data,
            call.operands[segment, 0, 0].nbytes,
            call.row_numbers[segment, 0].ctypes.data,
            call.row_numbers[segment, 1].ctypes.data,
            call.row_numbers[segment, 2].ctypes.data,
            call.row_numbers[segment, 3].ctypes.data,
            call.row_numbers[segment, 4].ctypes.data,
            call.lane_numbers[segment, 0].ctypes.data,
            call.lane_numbers[segment, 1].ctypes.data,
            call.lane_numbers[segment, 2].ctypes.data,
            call.lane_numbers[segment, 3].ctypes.data,
        ),
    )


@jit_inlined
def _form(bits, limit, inner, lanes, group, records, record):
    groups, scales = (lanes + group - 1) // group, inner * bits // 8 * lanes
    return Form(bits, limit, middle_of_codes(bits, limit), inner, lanes, group, groups, scales, records, record)


@jit_part
def _limit(inner, bits, byte):
    """The largest integer to round to: of 8 bits, or whose products with codes, added up, stay within 32 bits."""
    return byte if bits <= MOST_BITS_OF_QUADS else min(32767, (2**31 - 1) // ((2**bits - 1) * inner))


@jit_inlined
def put_into_slot(slot, item, head, start, tokens, following, next_tokens, key_form, value_form, at):
    """
    Let a block of a head be attended to next in a slot.

    item: its number; start: its first token; tokens: which of it, by the first and the one after the last, multiples of
    16; following, next_tokens: likewise, of what comes into the slot after it.
    """
    numbers = _slots(at)
    leader = slot
    for other in range(slot - 1, -1, -1):
        if numbers[other, _HEAD] == head:
            leader = other
    numbers[slot, _HEAD], numbers[slot, _LEADER], numbers[slot, _START] = head, leader, start
    numbers[slot, _FIRST], numbers[slot, _END] = tokens
    numbers[slot, _KEYS] = key_form.records + item * key_form.record
    numbers[slot, _VALUES] = value_form.records + item * value_form.record
    numbers[slot, _NEXT_FIRST], numbers[slot, _NEXT_END] = next_tokens
    numbers[slot, _NEXT_KEYS] = key_form.records + following * key_form.record
    numbers[slot, _NEXT_VALUES] = value_form.records + following * value_form.record


@jit_inlined
def _slots(at):
    return numba.carray(pointer(at.slots, numba.int64(0)), (SLOTS, SLOT_NUMBERS))


@jit_inlined
def attend_slots(count, plan, key_form, value_form, at):
    """Attend to what is in the first slots; as `attend_block`."""
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
    """Fold scales and lows of a group of keys into the query; ask for those that come next."""
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
    """Fold scales and lows of a group of values into the weights; ask for those that come next."""
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
    """Fold scales, and the lows that belong to them, into a slot's rows."""
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


@jit_part
def _score(count, group, plan, form, at):
    """Write the scores of a group's tokens; ask for the keys that come next."""
    slots = _slots(at)
    for slot in range(count):
        record, first, end = slots[slot, _KEYS], slots[slot, _FIRST], slots[slot, _END]
        ahead = slots[slot, _NEXT_KEYS]
        if not _are_whole(slot, slots):
            _prefetch_tokens_of_keys(ahead, slots[slot, _NEXT_FIRST], slots[slot, _NEXT_END], form)
            ahead = record
        operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * ROWS * 4
        constants, corrections = at.constants + slot * ROWS * 4, plan.corrections + slot * ROWS * 4
        scores = plan.scores + slot * ROWS * BLOCK * 4
        column, end = max(first, group * form.group), min(end, (group + 1) * form.group)
        while column + tile_columns() <= end:
            score_coded_tile(
                form.bits, form.limit > 0, operand, record, form.inner, form.lanes, column, steps, constants,
                corrections, scores, BLOCK * 4, ahead,
            )  # fmt: skip
            column += tile_columns()
        while column < end:
            score_narrow_coded_tile(
                form.bits, form.limit > 0, operand, record, form.inner, form.lanes, column, steps, constants,
                corrections, scores, BLOCK * 4, ahead,
            )  # fmt: skip
            column += 16


@jit_inlined
def _weigh_scores(count, row, plan, form, at):
    """
    Turn scores into weights.

    Slots of the same head take the same maxima: the first of them has the rows' sums and corrects what was summed up.
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


@jit_part
def _add_values(count, row, group, plan, form, at):
    """Correct what was summed up of a group's channels, and add the values of the tokens; ask for those that come."""
    slots = _slots(at)
    for slot in range(count):
        record, first, end = slots[slot, _VALUES], slots[slot, _FIRST], slots[slot, _END]
        ahead = slots[slot, _NEXT_VALUES] if _are_whole(slot, slots) else record
        operand, steps = at.operand + slot * at.operand_bytes, at.steps + slot * ROWS * 4
        constants, corrections = at.constants + slot * ROWS * 4, plan.corrections + slot * ROWS * 4
        target = plan.partial + (slots[slot, _HEAD] * plan.rows + row) * plan.width * 4
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


@jit_inlined
def _is_folded_with_weights(slot, slots, form):
    """Whether scales and lows of values are folded into weights as these are computed."""
    return form.limit > 0 and form.groups == 1 and slots[slot, _END] - slots[slot, _FIRST] == BLOCK


@jit_inlined
def _are_whole(slot, slots):
    """Whether all of a slot's block is attended to, and all of the next one: products ask for what comes then."""
    now = slots[slot, _END] - slots[slot, _FIRST]
    return min(now, slots[slot, _NEXT_END] - slots[slot, _NEXT_FIRST]) == BLOCK


@jit_inlined
def _prefetch_half(slot, record, half, slots, form):
    """
    Ask for half of the codes of a record that comes next, before products ask for all of them once more.

    Of many requests at a time the processor drops some. Smaller codes come faster than they are worked on: not asked
    for here.
    """
    if form.bits > MOST_BITS_OF_QUADS and _are_whole(slot, slots):
        prefetch_bytes(slots[slot, record] + half * form.scales // 2, form.scales // 2)


@jit_part
def _prefetch_tokens_of_keys(record, first, end, form):
    for word in range(form.inner * form.bits // 32):
        prefetch_bytes(record + (word * BLOCK + first) * 4, (end - first) * 4)


@jit_part
def _prefetch_tokens_of_values(record, first, end, form):
    token_bytes = form.lanes * form.bits // 8
    prefetch_bytes(record + first * token_bytes, (end - first) * token_bytes)


@jit_inlined
def _prefetch_scales_of_keys(record, group, form):
    """Ask for the scales and lows of a group of keys."""
    for first in range(0, form.inner, _LINE_SCALES):
        scales = record + form.scales + (group * form.inner + first) * 2
        prefetch_lines(scales, 1)
        prefetch_lines(scales + form.groups * form.inner * 2, 1)


@jit_inlined
def _prefetch_scales_of_values(record, first, end, group, form):
    """Ask for those of the tokens of a block from `first` to `end`."""
    scales = record + form.scales + (group * form.inner + first) * 2
    lows = scales + form.groups * form.inner * 2
    if end - first == BLOCK:
        prefetch_lines(scales, 2)
        prefetch_lines(lows, 2)
    else:
        prefetch_lines(scales, 1)
        prefetch_lines(lows, 1)
