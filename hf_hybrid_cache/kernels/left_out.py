"""
What is left out of the indexed blocks enters attention as an estimate: as much weight as the index says, on the mean of
the values that are read in any case.

Without it, what is read would carry the weight of what is not. The mean of all values would be little better
(docs/log.md), and would have to be stored.
"""

import numba
import numpy as np

from .attention import mask_scores, plan_of
from .blocks import BLOCK
from .compiled import jit_part
from .page_tiles import PAGES
from .tiles import ROWS, pointer, weigh_narrow_tile
from .vector_ir import LANES

_LOWEST_SEEN = -1e30  # scores of zero that a mask brings below this are not seen


@jit_part
def add_left_out(head, skipped, call):
    """
    Add the estimate of a head to the first segment of the blocks that are not indexed.

    skipped: how many blocks lie in memory between those before and those after the indexed ones.
    """
    if call.pages_read[head] == call.blocks * PAGES:
        return
    plan, real = plan_of(call.segments, call.attention), numba.float32(0)
    mean = np.zeros((ROWS, plan.width), np.float32)
    if not _find_mean(head, skipped, mean, plan, call):
        return
    state = call.bases.shape[0], plan.rows
    maxima = numba.carray(pointer(plan.maxima, real), state)
    sums = numba.carray(pointer(plan.sums, real), state)
    partial = numba.carray(pointer(plan.partial, real), (state[0], state[1], plan.width))
    left = _left_out(head, call)
    for row in range(len(left)):
        base, old = call.bases[head, row], maxima[head, row]
        # The segment may have none of the head's blocks.
        highest = base if np.isnan(old) else max(old, base)
        kept = 0.0 if np.isnan(old) else 2.0 ** (old - highest)
        added = 2.0 ** (base - highest) * left[row]
        maxima[head, row] = highest
        sums[head, row] = added + (kept * sums[head, row] if kept > 0 else 0.0)
        for column in range(plan.width):
            before = kept * partial[head, row, column] if kept > 0 else 0.0
            partial[head, row, column] = before + added * mean[0, column]


@jit_part
def _left_out(head, call):
    """What the pages that are not read add up to, by row, relative to the row's base."""
    left = np.zeros(call.attention.group * call.attention.query_length, np.float64)
    for row in range(len(left)):
        for segment in range(call.segments):
            for page in range(PAGES):
                left[row] += call.totals[segment, head, row, page]
    for block in range(call.blocks):
        run = call.chosen[block, head] - 1
        if run >= 0:
            for row in range(len(left)):
                for page in range(run // PAGES, run % PAGES + 1):
                    left[row] -= call.page_sums[head, block, row, page]
    for row in range(len(left)):
        left[row] = max(left[row], 0.0)
    return left


@jit_part
def _find_mean(head, skipped, mean, plan, call):
    """
    Write the mean of the values that the last query sees of the blocks that are not indexed, to the first row.

    False if it sees none.
    """
    attention, seen = call.attention, 0
    last = attention.group * attention.query_length - 1
    scores, corrections = np.empty((ROWS, BLOCK), np.float32), np.ones(ROWS, np.float32)
    heads, value_block = call.bases.shape[0], attention.values[0, 0].nbytes
    for number in range((attention.num_tokens + BLOCK - 1) // BLOCK - call.blocks):
        is_before = number < call.first
        start = (number if is_before else number + call.blocks) * BLOCK
        place = number if is_before else number + skipped
        for row in range(ROWS):
            for token in range(BLOCK):
                scores[row, token] = 0
        mask_scores(head, last // ROWS * ROWS, start, scores.ctypes.data, numba.float32(1), plan)
        tokens = min(BLOCK, attention.num_tokens - start)
        for token in range(tokens):
            is_seen = scores[last % ROWS, token] > _LOWEST_SEEN
            seen += is_seen
            for row in range(ROWS):
                scores[row, token] = is_seen
        values = attention.values.ctypes.data + (place * heads + head) * value_block
        for column in range(0, plan.width, LANES):
            weigh_narrow_tile(
                plan.element, scores.ctypes.data, values, tokens, plan.width, column, corrections.ctypes.data,
                mean.ctypes.data, values,
            )  # fmt: skip
    for column in range(plan.width):
        mean[0, column] /= max(seen, 1)
    return seen > 0
