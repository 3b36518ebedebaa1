"""
Attention of a few queries over the chosen pages of float blocks in host memory.

There are four steps. The index of all keys rates each page of sixteen tokens. Each KV head chooses the fewest pages
that carry the wanted share. The queries attend to those pages, or to all pages if those are too many. Partial results
are merged, as in `attention`. The first and the last blocks, which are not indexed, are all attended to.
"""

import numpy as np

from ..attention.attention import (
    attend_blocks,
    merge_plain_segments,
    share,
    started_segment,
    take_queries,
    weigh_values,
    weights_of_tile,
)
from ..attention.page_tiles import PAGE, hide_pages
from ..blocks import BLOCK
from ..vector.calls import taking
from ..vector.compiled import Needed, jit, jit_function
from ..vector.tiles import ROWS, score_narrow_tile
from .page_selection import SelectedCall, attending_to_chosen, gather_runs, run_of
from .skipped_pages import add_skipped


@jit_function
def _attend_to_rest(part, call):
    """Attend to a segment of the blocks that are not indexed, before and after the indexed ones."""
    segments, heads = call.attention.maxima.shape[:2]
    blocks = (call.attention.num_tokens + BLOCK - 1) // BLOCK - call.blocks
    items = share(part, segments - call.segments, blocks * heads)
    attend_blocks(call.segments + part, items, call.first * heads, call.blocks * heads, call.attention)


@jit_function
def _attend_to_all(segment, call):
    heads = call.attention.maxima.shape[1]
    items = share(segment, call.segments, call.blocks * heads)
    attend_blocks(segment, items, 0, call.first * heads, call.attention)


@jit_function
def _attend_to_chosen(segment, call):
    """Attend to the chosen pages of a segment, in the order of memory."""
    attention, runs = call.attention, gather_runs(segment, call)
    heads = attention.maxima.shape[1]
    plan = started_segment(segment, share(segment, call.segments, call.blocks * heads), attention)
    key_block, value_block = attention.keys[0, 0].nbytes, attention.values[0, 0].nbytes
    keys = attention.keys.ctypes.data + call.first * heads * key_block
    values = attention.values.ctypes.data + call.first * heads * value_block
    for index in range(len(runs)):
        item, first, end = run_of(runs[index])
        following, next_first, _ = run_of(runs[min(index + 1, len(runs) - 1)])
        ahead = keys + following * key_block, values + following * value_block, next_first
        start = (call.first + item // heads) * BLOCK
        here = keys + item * key_block, values + item * value_block
        _attend_to_pages(item % heads, start, *here, value_block // BLOCK, first, end, *ahead, plan)


@jit_function
def _attend_to_pages(head, start, keys, values, token_bytes, first, end, next_keys, next_values, next_first, plan):
    """
    Attend to the tokens of one block of one head from `first` to `end`, multiples of 16.

    Each step prefetches a part of the next block, from the token `next_first` on: the processor would wait if it
    prefetched much at once.
    """
    ahead = next_keys + (next_first - first) * (token_bytes // plan.width)
    values, next_values = values + first * token_bytes, next_values + next_first * token_bytes
    for row in range(0, plan.rows, ROWS):
        query = plan.query + (head * plan.rows + row) * plan.query_bytes
        for column in range(first, end, PAGE):
            score_narrow_tile(plan.element, query, plan.query_bytes, keys, plan.key_dim, plan.scores, column, ahead)
        hide_pages(plan.scores, first // PAGE, end // PAGE)
        weights_of_tile(head, row, start, plan)
        weigh_values(head, row, plan.scores + first * 4, values, end - first, next_values, plan)


@jit_function
def _add_skipped(head, call):
    add_skipped(head, call.blocks, call)


@jit_function
def _merge_segments(head, call):
    merge_plain_segments(head, call.attention)


_attend = attending_to_chosen(_attend_to_rest, _attend_to_all, _attend_to_chosen, _add_skipped, _merge_segments)


@jit
def attend_selected(team, call):
    """Attend as `call` says, on several threads as `split_work` says."""
    take_queries(call.attention)
    _attend(team, call)


def selected_attention_kernels(element: np.dtype) -> list[Needed]:
    """The kernel that attends to chosen pages of blocks of `element`."""
    return [(attend_selected, taking(SelectedCall, element))]
