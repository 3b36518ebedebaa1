"""
Attention of a few queries over coded blocks in host memory that reads only the pages that carry the weight.

As in `selected_attention`; blocks in full precision, before and after the coded ones, are all attended to.
"""

import numpy as np

from .blocks import BLOCK
from .coded_attention import (
    attend_full_segment,
    attend_segment,
    coded_call_type,
    merge_coded_segments,
    prefetch_mixing,
    rotate_queries,
    started_coded_segment,
)
from .coded_slots import attend_slots, forms_of, put_into_slot
from .compiled import Needed, jit, jit_part
from .folding import SLOTS
from .left_out import add_left_out
from .page_choice import (
    choose_pages,
    gather_runs,
    prepare_rows,
    rate_segment,
    reads_all,
    run_of,
    taking_selected,
)
from .parallel import share_out


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
        share_out(parallel, team, threads, heads, _add_left_out, call)
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
    for index in range(0, len(runs), SLOTS):
        count = min(SLOTS, len(runs) - index)
        for slot in range(count):
            item, first, end = run_of(runs[index + slot])
            following, next_first, next_end = run_of(runs[min(index + slot + SLOTS, len(runs) - 1)])
            block = item // heads
            head, start = item - block * heads, (coded.first_coded + block) * BLOCK
            put_into_slot(slot, item, head, start, (first, end), following, (next_first, next_end), *forms)
        attend_slots(count, plan, *forms)


@jit_part
def _add_left_out(head, call):
    add_left_out(head, 0, call)


@jit_part
def _merge_segments(head, call):
    merge_coded_segments(head, call.attention)


def selected_code_kernels(element: np.dtype) -> list[Needed]:
    """What attends to chosen pages of codes beside blocks of `element`."""
    return [(attend_selected_codes, taking_selected(coded_call_type(element)))]
