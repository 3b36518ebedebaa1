"""
An estimate of the indexed pages that are not read.

It is the mean of the values that are not indexed, with the weight that the index gives these pages. Without the
estimate, the pages that are read would also carry the weight of those that are not. The mean of all values would be
little better (docs/log.md), and would have to be stored.
"""

import numba
import numpy as np

from ..attention.attention import mask_scores, plan_of
from ..attention.page_tiles import PAGES
from ..blocks import BLOCK
from ..vector.compiled import jit_function
from ..vector.tiles import ROWS, pointer, weigh_narrow_tile
from ..vector.vector_ir import LANES

_LOWEST_SEEN = -1e30  # a token is hidden if a mask brings a score of zero below this


@jit_function
def add_skipped(head, skipped, call):
    """
    Add the estimate of a head to the first segment of the blocks that are not indexed.

    skipped: number of blocks in memory between the blocks before the indexed ones and those after.
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


@jit_function
def _left_out(head, call):
    """The sum of the pages that are not read, for each row, relative to the row's base."""
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


@jit_function
def _find_mean(head, skipped, mean, plan, call):
    """
    Write to the first row of `mean` the mean of the values, not indexed, that the last query sees.

    Returns whether it sees any.
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
