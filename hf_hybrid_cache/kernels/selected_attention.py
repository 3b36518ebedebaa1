"""
Attention of a few queries that reads, of coded blocks, all keys and only those values that carry the weight.

In four steps: what each page of sixteen tokens is worth, by the codes of all keys; for each KV head the fewest pages
that carry the wanted share; attention to those, or to all where those are too many; and the results merged, as in
`coded_attention`. Blocks in full precision are all attended to.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .attention import call_type, highest_of, mask_scores, signature, weights_of_tile
from .blocks import BLOCK
from .coded_attention import (
    SLOTS,
    CodedCall,
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
from .page_tiles import PAGE, PAGES, float_bits, hide_pages, page_tile, power_of_two
from .parallel import share_out
from .tiles import ROWS
from .vector_ir import CACHE_LINE

# What pages are worth is sorted by the upper bits of a float: eight bins from one power of two to the next.
_DROPPED_BITS = 20
BINS = 2 ** (31 - _DROPPED_BITS)
_RUNS = PAGES * PAGES  # of the pages of a block, by its first and its last one


class SelectedCall(NamedTuple):
    """One call of `attend_selected`."""

    coded: CodedCall
    mass: float  # the share that is wanted, on average over the rows of a KV head
    most_pages: int  # of all heads; where more are needed, all are read
    page_bases: Any  # float32 [coded blocks or more, heads, rows], see `page_tile`; scratch as all but `pages_read`
    page_sums: Any  # float32 [coded blocks or more, heads, rows, PAGES]
    row_bases: Any  # float32 [heads, rows]
    row_factors: Any  # float32 [heads, rows]: makes shares of sums that are relative to the base
    shares: Any  # float32 [heads, coded blocks or more, PAGES], added up over rows
    histogram: Any  # float64 [heads, BINS]: shares of the pages whose share has these upper bits
    chosen: Any  # uint8 [coded blocks or more, heads]: 0, or 1 plus the number of the run of pages that is read
    runs: Any  # int64 [coded blocks or more, heads]: the chosen ones of a segment, together
    pages_read: Any  # int64 [heads], written


@jit
def attend_selected(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.coded.maxima.shape[:2]
    rotate_queries(call.coded)
    share_out(parallel, team, threads, segments, _rate_segment, call)
    share_out(parallel, team, threads, heads, _choose_pages, call)
    pages = 0
    for head in range(heads):
        pages += call.pages_read[head]
    if pages <= call.most_pages:
        share_out(parallel, team, threads, call.coded.coded_segments, _attend_to_chosen, call)
    else:
        for head in range(heads):
            call.pages_read[head] = call.coded.coded_blocks * PAGES
        share_out(parallel, team, threads, call.coded.coded_segments, _attend_to_all, call)
    share_out(parallel, team, threads, heads, _merge_segments, call)


@jit_part
def _rate_segment(segment, call):
    """Find what the pages of some coded blocks are worth; attend to blocks in full precision."""
    coded = call.coded
    if segment >= coded.coded_segments:
        attend_full_segment(segment, coded)
        return
    heads = coded.maxima.shape[1]
    items, plan = started_coded_segment(segment, coded)
    key_form, _, at = forms_of(segment, coded)
    keys, bases, sums = coded.key_records.ctypes.data, call.page_bases.ctypes.data, call.page_sums.ctypes.data
    for item in range(items.start, items.stop, SLOTS):
        count = min(SLOTS, items.stop - item)
        _rate_blocks(item, count, heads, keys, bases, sums, coded.first_coded, plan, key_form, at)


@jit_part
def _rate_blocks(first, count, heads, keys, bases, sums, first_coded, plan, form, at):
    """Rate the pages of blocks of heads that follow each other, from number `first` on."""
    keys = keys + first * form.record
    ahead = keys + count * form.record
    for slot in range(count):
        prefetch_numbers(ahead + slot * form.record + form.scales, form.groups * form.inner * 4)
    for row in range(0, plan.rows, ROWS):
        for group in range(form.groups):
            for slot in range(count):
                query = at.rotated + ((first + slot) % heads * plan.rows + row) * plan.query_bytes
                record = keys + slot * form.record
                fold_group(slot, query, plan.query_bytes, record, group, 0, form.inner, form, at)
            for slot in range(count):
                record, next_read = keys + slot * form.record, ahead + slot * form.record
                score_tokens(slot, record, group, 0, BLOCK, next_read, plan, form, at)
        for slot in range(count):
            block = (first + slot) // heads
            head = first + slot - block * heads
            factor = mask_scores(head, row, (first_coded + block) * BLOCK, plan, slot)
            state, place = (head * plan.rows + row) * 4, ((first + slot) * plan.rows + row) * 4
            scores = plan.scores + slot * ROWS * BLOCK * 4
            page_tile(scores, factor, plan.maxima + state, plan.sums + state, bases + place, sums + place * PAGES)


@jit_part
def _choose_pages(head, call):
    """Choose the fewest pages of a head that, with all that is in full precision, carry the wanted share."""
    wanted = _missing_share(head, call)
    if not np.isfinite(wanted):  # nor are shares: all is read, and says so
        for block in range(call.coded.coded_blocks):
            call.chosen[block, head] = 1 + (PAGES - 1)  # from the first page to the last
        call.pages_read[head] = call.coded.coded_blocks * PAGES
        return
    _add_up_shares(head, call)
    edge, missing = _edge(head, wanted, call)
    pages = 0
    for block in range(call.coded.coded_blocks):
        first = last = -1
        for page in range(PAGES):
            worth = call.shares[head, block, page]
            place = float_bits(worth) >> _DROPPED_BITS
            if place > edge or (place == edge and missing > 0):
                first, last = page if first < 0 else first, page
                missing -= worth if place == edge else 0.0
        call.chosen[block, head] = 0 if first < 0 else 1 + first * PAGES + last
        pages += 0 if first < 0 else last - first + 1
    call.pages_read[head] = pages


@jit_part
def _missing_share(head, call):
    """
    The share that coded blocks are to add, summed over rows; infinite where a number is not finite.

    Writes what makes shares of the sums of each row.
    """
    coded, wanted = call.coded, 0.0
    for row in range(coded.group * coded.query_length):
        base = np.ceil(highest_of(head, row, coded.maxima))
        total = full = 0.0
        for segment in range(coded.maxima.shape[0]):
            if not np.isnan(coded.maxima[segment, head, row]):
                part = 2.0 ** (coded.maxima[segment, head, row] - base) * coded.sums[segment, head, row]
                total += part
                full += part if segment >= coded.coded_segments else 0.0
        call.row_bases[head, row] = base
        call.row_factors[head, row] = 0.0 if total == 0 else 1.0 / total
        if not np.isfinite(total):
            return np.inf
        if total > 0:
            wanted += call.mass - full / total
    return wanted


@jit_part
def _add_up_shares(head, call):
    """Write the share of each page and sort them into bins."""
    rows = call.coded.group * call.coded.query_length
    histogram = call.histogram[head]
    for place in range(BINS):
        histogram[place] = 0.0
    for block in range(call.coded.coded_blocks):
        a = b = c = d = numba.float32(0)
        for row in range(rows):
            weight = power_of_two(call.page_bases[block, head, row] - call.row_bases[head, row])
            weight *= call.row_factors[head, row]
            a += weight * call.page_sums[block, head, row, 0]
            b += weight * call.page_sums[block, head, row, 1]
            c += weight * call.page_sums[block, head, row, 2]
            d += weight * call.page_sums[block, head, row, 3]
        for page, worth in enumerate((a, b, c, d)):
            call.shares[head, block, page] = worth
            histogram[float_bits(worth) >> _DROPPED_BITS] += worth


@jit_part
def _edge(head, wanted, call):
    """The lowest bin of which pages are needed, and what share of it."""
    edge = BINS
    while wanted > 0 and edge > 0:
        edge -= 1
        wanted -= call.histogram[head, edge]
    return edge, wanted + (call.histogram[head, edge] if edge < BINS else 0.0)


@jit_part
def _attend_to_chosen(segment, call):
    """Attend to the chosen pages of some coded blocks, as they lie."""
    coded = call.coded
    heads = coded.maxima.shape[1]
    items, plan = started_coded_segment(segment, coded)
    forms = forms_of(segment, coded)
    prefetch_mixing(segment, coded)
    runs, chosen = call.runs.ravel(), call.chosen.ravel()
    end = items.start
    for item in items:
        if chosen[item]:
            runs[end] = item * _RUNS + chosen[item] - 1
            end += 1
    keys, values = coded.key_records.ctypes.data, coded.value_records.ctypes.data
    for index in range(items.start, end, SLOTS):
        _attend_to_runs(runs[index:end], heads, keys, values, coded.first_coded, plan, *forms)


@jit_part
def _attend_to_all(segment, call):
    attend_segment(segment, call.coded)


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
                item, _, _ = _run(runs[slot])
                _prefetch_scales(_following(runs, slot), keys, key_form)
                query = at.rotated + (item % heads * plan.rows + row) * plan.query_bytes
                record = keys + item * key_form.record
                fold_group(slot, query, plan.query_bytes, record, group, 0, key_form.inner, key_form, at)
            for slot in range(count):
                item, first, end = _run(runs[slot])
                _prefetch_keys(_following(runs, slot), keys, key_form)
                record = keys + item * key_form.record
                score_tokens(slot, record, group, first, end, record, plan, key_form, at)
        for slot in range(count):
            item, first, end = _run(runs[slot])
            _prefetch_values(_following(runs, slot), values, value_form)
            hide_pages(plan.scores + slot * ROWS * BLOCK * 4, first // PAGE, end // PAGE)
            weights_of_tile(item % heads, row, (first_coded + item // heads) * BLOCK, plan, slot)
        for group in range(value_form.groups):
            for slot in range(count):
                item, first, end = _run(runs[slot])
                weights, record = plan.scores + slot * ROWS * BLOCK * 4, values + item * value_form.record
                fold_group(slot, weights, BLOCK * 4, record, group, first, end, value_form, at)
            for slot in range(count):
                item, first, end = _run(runs[slot])
                record = values + item * value_form.record
                target = plan.partial + (item % heads * plan.rows + row) * plan.width * 4
                weigh_tokens(slot, record, group, first, end, record, target, plan, value_form, at)


@jit_part
def _run(run):
    """The block and head of a run, as one number, and its tokens: the first one, and the one after the last."""
    return run // _RUNS, run % _RUNS // PAGES * PAGE, (run % PAGES + 1) * PAGE


@jit_part
def _following(runs, slot):
    """The run that a slot attends to next; of none, the last one."""
    return runs[min(slot + SLOTS, len(runs) - 1)]


@jit_part
def _prefetch_scales(run, records, form):
    """Ask for the scales and lows of a run's keys."""
    prefetch_numbers(records + run // _RUNS * form.record + form.scales, form.groups * form.inner * 4)


@jit_part
def _prefetch_keys(run, records, form):
    item, first, end = _run(run)
    for word in range(form.inner * form.bits // 32):
        prefetch_numbers(records + item * form.record + (word * BLOCK + first) * 4, (end - first) * 4)


@jit_part
def _prefetch_values(run, records, form):
    """Ask for the values of a run, with their scales and lows."""
    item, first, end = _run(run)
    record, token_bytes = records + item * form.record, form.lanes * form.bits // 8
    prefetch_numbers(record + first * token_bytes, (end - first) * token_bytes)
    for row in range(2 * form.groups):
        prefetch_numbers(record + form.scales + (row * form.inner + first) * 2, CACHE_LINE)


@jit_part
def _merge_segments(head, call):
    merge_coded_segments(head, call.coded)


def compile_selected_attention(element: np.dtype) -> None:
    """Compile attention to chosen pages beside blocks of `element`, or load it from Numba's cache on disk."""
    real = numba.float32
    fields = {
        "coded": coded_call_type(element),
        "mass": numba.float64,
        "page_bases": real[:, :, ::1],
        "page_sums": real[:, :, :, ::1],
        "row_bases": real[:, ::1],
        "row_factors": real[:, ::1],
        "shares": real[:, :, ::1],
        "histogram": numba.float64[:, ::1],
        "chosen": numba.uint8[:, ::1],
        "runs": numba.int64[:, ::1],
        "pages_read": numba.int64[::1],
    }
    attend_selected.compile(signature(call_type(SelectedCall, fields)))
