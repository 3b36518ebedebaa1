"""
Attention of a few queries over coded blocks in host memory that reads only the pages that carry the weight.

As in `selected_attention`; blocks in full precision, before and after the coded ones, are all attended to.
"""

import numpy as np

from .attention import weights_of_tile
from .blocks import BLOCK
from .coded_attention import (
    SLOTS,
    attend_full_segment,
    attend_segment,
    coded_call_type,
    fold_group,
    forms_of,
    merge_coded_segments,
    prefetch_mixing,
    rotate_queries,
    score_tokens,
    started_coded_segment,
    weigh_tokens,
)
from .coded_tiles import prefetch_numbers
from .compiled import jit, jit_part
from .page_choice import (
    RUNS,
    choose_pages,
    gather_runs,
    prepare_rows,
    rate_segment,
    reads_all,
    run_of,
    selected_signature,
)
from .page_tiles import PAGE, hide_pages
from .parallel import share_out
from .tiles import ROWS
from .vector_ir import CACHE_LINE


@jit
def attend_selected_codes(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.attention.maxima.shape[:2]
    rotate_queries(call.attention)
    share_out(parallel, team, threads, segments - call.segments, _attend_to_rest, call)
    share_out(parallel, team, threads, heads, prepare_rows, call)
    share_out(parallel, team, threads, call.segments, rate_segment, call)
    share_out(parallel, team, threads, heads, choose_pages, call)
    if reads_all(call):
        share_out(parallel, team, threads, call.segments, _attend_to_all, call)
    else:
        share_out(parallel, team, threads, call.segments, _attend_to_chosen, call)
    share_out(parallel, team, threads, heads, _merge_segments, call)


@jit_part
def _attend_to_rest(part, call):
    """Attend to some of the blocks in full precision."""
    attend_full_segment(call.segments + part, call.attention)


@jit_part
def _attend_to_all(segment, call):
    attend_segment(segment, call.attention)


@jit_part
def _attend_to_chosen(segment, call):
    """Attend to the chosen pages of some coded blocks, as they lie."""
    coded, runs = call.attention, gather_runs(segment, call)
    heads = coded.maxima.shape[1]
    _, plan = started_coded_segment(segment, coded)
    forms = forms_of(segment, coded)
    prefetch_mixing(segment, coded)
    keys, values = coded.key_records.ctypes.data, coded.value_records.ctypes.data
    for index in range(0, len(runs), SLOTS):
        _attend_to_runs(runs[index:], heads, keys, values, coded.first_coded, plan, *forms)


@jit_part
def _attend_to_runs(runs, heads, keys, values, first_coded, plan, key_form, value_form, at):
    """
    Attend to the first of those runs that are left, as many as there are slots.

    What a slot needs next is asked for step by step: a processor waits where it has asked for much at once.
    """
    count = min(SLOTS, len(runs))
    for row in range(0, plan.rows, ROWS):
        for group in range(key_form.groups):
            for slot in range(count):
                item, _, _ = run_of(runs[slot])
                _prefetch_scales(_following(runs, slot), keys, key_form)
                query = at.rotated + (item % heads * plan.rows + row) * plan.query_bytes
                record = keys + item * key_form.record
                fold_group(slot, query, plan.query_bytes, record, group, 0, key_form.inner, key_form, at)
            for slot in range(count):
                item, first, end = run_of(runs[slot])
                _prefetch_keys(_following(runs, slot), keys, key_form)
                record = keys + item * key_form.record
                score_tokens(slot, record, group, first, end, record, plan, key_form, at)
        for slot in range(count):
            item, first, end = run_of(runs[slot])
            _prefetch_values(_following(runs, slot), values, value_form)
            hide_pages(plan.scores + slot * ROWS * BLOCK * 4, first // PAGE, end // PAGE)
            weights_of_tile(item % heads, row, (first_coded + item // heads) * BLOCK, plan, slot)
        for group in range(value_form.groups):
            for slot in range(count):
                item, first, end = run_of(runs[slot])
                weights, record = plan.scores + slot * ROWS * BLOCK * 4, values + item * value_form.record
                fold_group(slot, weights, BLOCK * 4, record, group, first, end, value_form, at)
            for slot in range(count):
                item, first, end = run_of(runs[slot])
                record = values + item * value_form.record
                target = plan.partial + (item % heads * plan.rows + row) * plan.width * 4
                weigh_tokens(slot, record, group, first, end, record, target, plan, value_form, at)


@jit_part
def _following(runs, slot):
    """The run that a slot attends to next; of none, the last one."""
    return runs[min(slot + SLOTS, len(runs) - 1)]


@jit_part
def _prefetch_scales(run, records, form):
    """Ask for the scales and lows of a run's keys."""
    prefetch_numbers(records + run // RUNS * form.record + form.scales, form.groups * form.inner * 4)


@jit_part
def _prefetch_keys(run, records, form):
    item, first, end = run_of(run)
    for word in range(form.inner * form.bits // 32):
        prefetch_numbers(records + item * form.record + (word * BLOCK + first) * 4, (end - first) * 4)


@jit_part
def _prefetch_values(run, records, form):
    """Ask for the values of a run, with their scales and lows."""
    item, first, end = run_of(run)
    record, token_bytes = records + item * form.record, form.lanes * form.bits // 8
    prefetch_numbers(record + first * token_bytes, (end - first) * token_bytes)
    for row in range(2 * form.groups):
        prefetch_numbers(record + form.scales + (row * form.inner + first) * 2, CACHE_LINE)


@jit_part
def _merge_segments(head, call):
    merge_coded_segments(head, call.attention)


def compile_selected_codes(element: np.dtype) -> None:
    """Compile attention to chosen pages beside blocks of `element`, or load it from Numba's cache on disk."""
    attend_selected_codes.compile(selected_signature(coded_call_type(element)))
