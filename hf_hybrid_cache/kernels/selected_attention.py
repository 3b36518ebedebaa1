"""
Attention of a few queries over float blocks in host memory that reads only the pages that carry the weight.

In four steps: what each page of sixteen tokens is worth, by the index of all keys; for each KV head the fewest pages
that carry the wanted share; attention to those, or to all where those are too many; and the results merged, as in
`attention`. The first and the last blocks, which are not indexed, are all attended to.
"""

import numpy as np

from .attention import (
    attend_blocks,
    merge_segments,
    plain_call_type,
    share,
    started_segment,
    weigh_values,
    weights_of_tile,
)
from .blocks import BLOCK
from .compiled import Needed, jit, jit_part
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
from .page_tiles import PAGE, hide_pages
from .parallel import share_out
from .tiles import ROWS, score_narrow_tile


@jit
def attend_selected(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.attention.maxima.shape[:2]
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
    """Attend to some of the blocks before the indexed ones, and after them."""
    segments, heads = call.attention.maxima.shape[:2]
    blocks = (call.attention.num_tokens + BLOCK - 1) // BLOCK - call.blocks
    items = share(part, segments - call.segments, blocks * heads)
    attend_blocks(call.segments + part, items, call.first * heads, call.blocks * heads, call.attention)


@jit_part
def _attend_to_all(segment, call):
    heads = call.attention.maxima.shape[1]
    items = share(segment, call.segments, call.blocks * heads)
    attend_blocks(segment, items, 0, call.first * heads, call.attention)


@jit_part
def _attend_to_chosen(segment, call):
    """Attend to the chosen pages of some blocks, as they lie."""
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


@jit_part
def _attend_to_pages(head, start, keys, values, token_bytes, first, end, next_keys, next_values, next_first, plan):
    """
    Attend to the tokens of one block of one head from `first` to `end`, multiples of 16.

    Meanwhile the pages from `next_first` on of another block are asked for, step by step: a processor waits where it
    has asked for much at once.
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


@jit_part
def _add_left_out(head, call):
    add_left_out(head, call.blocks, call)


@jit_part
def _merge_segments(head, call):
    merge_segments(head, call.attention, 0, 0, 1, call.attention.partial[0, 0, :0])


def selected_attention_kernels(element: np.dtype) -> list[Needed]:
    """What attends to chosen pages of blocks of `element`."""
    return [(attend_selected, taking_selected(plain_call_type(element)))]
