"""
Attention of a few queries over the chosen pages of quantized blocks in host memory.

The steps are those of `selected_attention`. Blocks in full precision, before and after the quantized ones, are all
attended to.
"""

import numpy as np

from ..attention.attention import take_queries
from ..attention.quantized_attention import (
    attend_full_segment,
    attend_segment,
    merge_quantized_segments,
    prefetch_rotation_matrix,
    rotate_queries,
    started_quantized_segment,
)
from ..attention.quantized_slots import attend_slots, forms_of, put_into_slot
from ..blocks import BLOCK
from ..quantized.folding import SLOTS
from ..vector.calls import taking
from ..vector.compiled import Needed, jit, jit_function
from .page_selection import SelectedQuantizedCall, attending_to_chosen, gather_runs, run_of
from .skipped_pages import add_skipped


@jit_function
def _attend_to_rest(part, call):
    """Attend to a segment of the blocks in full precision."""
    attend_full_segment(call.segments + part, call.attention)


@jit_function
def _attend_to_all(segment, call):
    attend_segment(segment, call.attention)


@jit_function
def _attend_to_chosen(segment, call):
    """Attend to the chosen pages of a segment of quantized blocks, in the order of memory."""
    quantized, runs = call.attention, gather_runs(segment, call)
    heads = quantized.maxima.shape[1]
    _, plan = started_quantized_segment(segment, quantized)
    forms = forms_of(segment, quantized)
    prefetch_rotation_matrix(segment, quantized)
    for index in range(0, len(runs), SLOTS):
        count = min(SLOTS, len(runs) - index)
        for slot in range(count):
            item, first, end = run_of(runs[index + slot])
            following, next_first, next_end = run_of(runs[min(index + slot + SLOTS, len(runs) - 1)])
            block = item // heads
            head, start = item - block * heads, (quantized.first_quantized + block) * BLOCK
            put_into_slot(slot, item, head, start, (first, end), following, (next_first, next_end), *forms)
        attend_slots(count, plan, *forms)


@jit_function
def _add_skipped(head, call):
    add_skipped(head, 0, call)


@jit_function
def _merge_segments(head, call):
    merge_quantized_segments(head, call.attention)


_attend = attending_to_chosen(_attend_to_rest, _attend_to_all, _attend_to_chosen, _add_skipped, _merge_segments)


@jit
def attend_selected_quantized(team, call):
    """Attend as `call` says, on several threads as `split_work` says."""
    take_queries(call.attention)
    rotate_queries(call.attention)
    _attend(team, call)


def selected_quantized_kernels(element: np.dtype) -> list[Needed]:
    """The kernel that attends to chosen pages of quantized blocks beside blocks of `element`."""
    return [(attend_selected_quantized, taking(SelectedQuantizedCall, element))]
