"""
Top-p page selection for a few queries: the index of the keys rates the pages, and their shares choose among them.

The pages of sixteen tokens are rated in the order of the index: all heads of a block before the next block. Then each
KV head chooses the fewest pages that carry the wanted share of the attention.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba import boolean, float32, float64, int64, uint8, uint16

from ..attention.attention import Call, highest_of, is_masked, mask_scores, share, started_segment
from ..attention.page_tiles import PAGE, PAGES, float_bits, page_tile, scale_scores, scaled_page_tile
from ..attention.quantized_attention import QuantizedCall
from ..blocks import BLOCK
from ..quantized.folding import SLOTS, find_constants, find_steps, fold_rows, middle_of_codes, round_rows
from ..quantized.quantized_tiles import score_quantized_tile
from ..vector.calls import kernel_call
from ..vector.compiled import jit_function
from ..vector.numbers_at import keep
from ..vector.parallel import split_work
from ..vector.rotation import rotate
from ..vector.tiles import ROWS, tile_columns
from ..vector.vector_ir import LANES
from .key_index import INDEX_BITS

# Shares are sorted into bins by the upper bits of a float: eight bins from one power of two to the next.
_DROPPED_BITS = 20
BINS = 2 ** (31 - _DROPPED_BITS)
RUNS = PAGES * PAGES  # runs of pages in a block, by the first and the last page
_LARGEST_DIGIT = 127  # largest integer of a rounded query
_AHEAD = 4  # packed blocks between the one that is read and the one that is prefetched
# The sum of a row that sees a token is larger.
_NOTHING = 1e-20


# One call of `attend_selected`.
SelectedCall = kernel_call(
    "SelectedCall",
    __name__,
    {
        "attention": Call,
        "index": uint8[:, :, ::1],  # [indexed blocks or more, heads, bytes], see `key_index`
        "first": int64,  # number of blocks before the indexed ones
        "blocks": int64,  # number of indexed blocks
        "segments": int64,  # segments of indexed blocks; those of the other blocks follow
        "is_integer": boolean,  # whether to use the processor's integer dot products
        "rotation": int64,  # channels of a key that were rotated together before it was indexed
        "top_p": float64,  # the share to read, on average over the rows of a KV head
        "most_pages": int64,  # of all heads; if more pages are needed, all are read
        "units": uint16[:, ::1],  # [2, inner] bfloat16 scales and minima, the same for the whole index
        "query": float32[:, :, ::1],  # [heads, rows, inner], rotated; this and all below but `pages_read` are scratch
        "folded": float32[:, :, ::1],  # [heads, rows, inner]
        "operands": float32[:, :, ::1],  # [heads, rows, inner]
        "steps": float32[:, ::1],  # [heads, rows]
        "constants": float32[:, ::1],  # [heads, rows]
        "bases": float32[:, ::1],  # [heads, rows] base of the sums, see `page_tile`
        "page_sums": float32[:, :, :, ::1],  # [heads, indexed blocks or more, rows, PAGES]
        "totals": float32[:, :, :, ::1],  # [segments, heads, rows, PAGES] sums of `page_sums` over blocks
        "row_factors": float32[:, ::1],  # [heads, rows] a page's sum times this is its share
        "shares": float32[:, :, ::1],  # [heads, indexed blocks or more, PAGES] summed over rows
        "histogram": float64[:, ::1],  # [heads, BINS] sum of the shares in each bin
        "chosen": uint8[:, ::1],  # [indexed blocks or more, heads] 0, or 1 plus the number of the run to read
        "runs": int64[:, ::1],  # [indexed blocks or more, heads] the chosen runs of a segment, without gaps
        "pages_read": int64[::1],  # written [heads]
    },
)
# One call of `attend_selected_quantized`, whose quantized blocks are the indexed ones.
SelectedQuantizedCall = kernel_call(
    "SelectedQuantizedCall", __name__, SelectedCall.field_types | {"attention": QuantizedCall}
)


@jit_function
def prepare_rows(head, call):
    """
    Rotate the queries of a head as the keys of the index, round them, and choose the bases of their sums.

    A base is near the highest score of the blocks that are not indexed. If indexed scores are far higher, the sums are
    infinite, and all pages are read.
    """
    inner, rows = call.query.shape[2], call.query.shape[1]
    for row in range(rows):
        call.bases[head, row] = np.ceil(highest_of(head, row, call.attention.maxima[call.segments :]))
        for d in range(inner):
            call.query[head, row, d] = call.attention.query[head, row, d]
        rotate(call.query[head, row].ctypes.data, call.attention.keys.shape[2], call.rotation)
    units, limit = call.units.ctypes.data, _LARGEST_DIGIT if call.is_integer else 0
    numbers, lanes = np.empty((3, SLOTS * ROWS), np.float32), np.zeros((3, SLOTS, ROWS, LANES), np.float32)
    steps, factors, constants = numbers[0].ctypes.data, numbers[1].ctypes.data, numbers[2].ctypes.data
    highest, sums, totals = lanes[0].ctypes.data, lanes[1].ctypes.data, lanes[2].ctypes.data
    middle = middle_of_codes(INDEX_BITS, limit)
    for row in range(0, rows, ROWS):
        query, folded = call.query[head, row].ctypes.data, call.folded[head, row].ctypes.data
        operand = call.operands[head, row].ctypes.data
        fold_rows(query, inner * 4, units, units + inner * 2, inner, middle, limit, folded, operand, highest, sums)
        if limit > 0:
            find_steps(limit, highest, steps, factors)
            round_rows(folded, inner, INDEX_BITS, factors, operand, totals)
        find_constants(middle, limit, sums, totals, numba.float32(1), steps, constants)
        for tile_row in range(ROWS):
            call.steps[head, row + tile_row] = numbers[0, tile_row]
            call.constants[head, row + tile_row] = numbers[2, tile_row]
    keep(lanes)


class Rating(NamedTuple):
    """The numbers of a call that a segment needs to rate blocks."""

    index: int  # addresses of the first block and head, up to `sums`
    query: int
    operands: int
    steps: int
    constants: int
    bases: int
    totals: int
    sums: int
    packed_block: int  # bytes
    sums_of_head: int  # bytes from the sums of a head to those of the next
    inner: int
    first: int
    is_integer: bool


@jit_function
def rate_segment(segment, call):
    """Rate the pages of a segment of indexed blocks."""
    heads = call.attention.maxima.shape[1]
    items = share(segment, call.segments, call.blocks * heads)
    plan = started_segment(segment, items, call.attention)
    for head in range(heads):
        for row in range(plan.rows):
            for page in range(PAGES):
                call.totals[segment, head, row, page] = 0
    rating = Rating(
        index=call.index.ctypes.data,
        query=call.query.ctypes.data,
        operands=call.operands.ctypes.data,
        steps=call.steps.ctypes.data,
        constants=call.constants.ctypes.data,
        bases=call.bases.ctypes.data,
        totals=call.totals.ctypes.data + segment * heads * plan.rows * PAGES * 4,
        sums=call.page_sums.ctypes.data,
        packed_block=call.index.shape[2],
        sums_of_head=call.page_sums.shape[1] * plan.rows * PAGES * 4,
        inner=call.query.shape[2],
        first=call.first,
        is_integer=call.is_integer,
    )
    block = items.start // heads
    head = items.start - block * heads
    for item in range(items.start, items.stop):
        _rate_block(block, head, rating.index + item * rating.packed_block, rating, plan)
        head += 1
        if head == heads:
            block, head = block + 1, 0


@jit_function
def _rate_block(block, head, packed_block, rating, plan):
    """Rate the pages of one block of one head."""
    inner, start = rating.inner, (rating.first + block) * BLOCK
    scales = packed_block + inner * INDEX_BITS // 8 * BLOCK
    means = scales + BLOCK * 2
    for row in range(0, plan.rows, ROWS):
        place = head * plan.rows + row
        query, bases, totals = rating.query + place * inner * 4, rating.bases + place * 4, rating.totals + place * 16
        sums = rating.sums + head * rating.sums_of_head + (block * plan.rows + row) * PAGES * 4
        _score_block(place, packed_block, rating, plan)
        if is_masked(start, plan):
            scale_scores(plan.scores, query, inner * 4, scales, means, inner)
            factor = mask_scores(head, row, start, plan.scores, plan.factor, plan)
            page_tile(plan.scores, factor, bases, totals, sums)
        else:
            scaled_page_tile(plan.scores, query, inner * 4, scales, means, inner, plan.factor, bases, totals, sums)


@jit_function
def _score_block(place, packed_block, rating, plan):
    """Write the products of the codes of a block with four rows, from row `place` of all heads on."""
    operand, inner = rating.operands + place * rating.inner * 4, rating.inner
    steps, constants = rating.steps + place * 4, rating.constants + place * 4
    ahead, column = packed_block + _AHEAD * rating.packed_block, 0
    while column + tile_columns() <= BLOCK:
        score_quantized_tile(
            INDEX_BITS, rating.is_integer, operand, packed_block, inner, BLOCK, column, steps, constants,
            plan.corrections, plan.scores, BLOCK * 4, ahead,
        )  # fmt: skip
        column += tile_columns()


@jit_function
def choose_pages(head, call):
    """Choose the fewest pages of a head that, with the blocks that are not indexed, carry the wanted share."""
    wanted = _missing_share(head, call)
    if not np.isfinite(wanted):  # then shares are not finite either: read all pages
        for block in range(call.blocks):
            call.chosen[block, head] = 1 + (PAGES - 1)  # the run from the first page to the last
        call.pages_read[head] = call.blocks * PAGES
        return
    _add_up_shares(head, call)
    edge, missing = _edge(head, wanted, call)
    pages = 0
    for block in range(call.blocks):
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


@jit_function
def _missing_share(head, call):
    """
    The share that indexed blocks must add, summed over rows, so that all blocks that are read carry `top_p`.

    It is infinite if a sum is not finite or a row sees no token. Writes `row_factors`.
    """
    attention, wanted = call.attention, 0.0
    for row in range(attention.group * attention.query_length):
        rest = indexed = 0.0
        for segment in range(attention.maxima.shape[0]):
            if segment < call.segments:
                for page in range(PAGES):
                    indexed += call.totals[segment, head, row, page]
            elif not np.isnan(attention.maxima[segment, head, row]):
                lower = attention.maxima[segment, head, row] - call.bases[head, row]
                rest += 2.0**lower * attention.sums[segment, head, row]
        total = rest + indexed
        if not (np.isfinite(total) and total > _NOTHING):
            return np.inf
        call.row_factors[head, row] = 1.0 / total
        wanted += call.top_p - rest / total
    return wanted


@jit_function
def _add_up_shares(head, call):
    """Write the share of each page and sort them into bins."""
    rows = call.attention.group * call.attention.query_length
    histogram, sums, shares, factors = (
        call.histogram[head],
        call.page_sums[head],
        call.shares[head],
        call.row_factors[head],
    )
    for place in range(BINS):
        histogram[place] = 0.0
    for block in range(call.blocks):
        a = b = c = d = numba.float32(0)
        for row in range(rows):
            factor = factors[row]
            a += factor * sums[block, row, 0]
            b += factor * sums[block, row, 1]
            c += factor * sums[block, row, 2]
            d += factor * sums[block, row, 3]
        for page, worth in enumerate((a, b, c, d)):
            shares[block, page] = worth
            histogram[float_bits(worth) >> _DROPPED_BITS] += worth


@jit_function
def _edge(head, wanted, call):
    """The lowest bin with pages that are needed, and the share that is needed of it."""
    edge = BINS
    while wanted > 0 and edge > 0:
        edge -= 1
        wanted -= call.histogram[head, edge]
    return edge, wanted + (call.histogram[head, edge] if edge < BINS else 0.0)


@jit_function
def gather_runs(segment, call):
    """Write the chosen runs of a segment's blocks without gaps, and return them."""
    items = share(segment, call.segments, call.blocks * call.attention.maxima.shape[1])
    runs, chosen, end = call.runs.ravel(), call.chosen.ravel(), items.start
    for item in items:
        if chosen[item]:
            runs[end] = item * RUNS + chosen[item] - 1
            end += 1
    return runs[items.start : end]


@jit_function
def run_of(run):
    """The number of a run's block and head, and the first and the end of its tokens."""
    return run // RUNS, run % RUNS // PAGES * PAGE, (run % PAGES + 1) * PAGE


@jit_function
def reads_all(call):
    """Whether more than `most_pages` pages are needed. Then all pages are read, and counted as read."""
    heads, pages = len(call.pages_read), 0
    for head in range(heads):
        pages += call.pages_read[head]
    if pages <= call.most_pages:
        return False
    for head in range(heads):
        call.pages_read[head] = call.blocks * PAGES
    return True


def attending_to_chosen(attend_to_rest, attend_to_all, attend_to_chosen, add_skipped, merge):
    """
    Make the driver of attention to chosen pages.

    Numba keeps no compiled function that takes others as arguments, so each kind of block has its own driver. All
    arguments are jitted functions of a part and the call.

    attend_to_rest: attends to some of the blocks that are not indexed; attend_to_all, attend_to_chosen: attend to all
    pages, or the chosen ones, of some indexed blocks; add_skipped: adds the estimate of a head's skipped pages; merge:
    merges a head's segments.
    """

    @jit_function
    def attend(team, call):
        """Attend as `call` says, on several threads as `split_work` says."""
        segments, heads = call.attention.maxima.shape[:2]
        split_work(team, segments - call.segments, attend_to_rest, call)
        split_work(team, heads, prepare_rows, call)
        split_work(team, call.segments, rate_segment, call)
        split_work(team, heads, choose_pages, call)
        if reads_all(call):
            split_work(team, call.segments, attend_to_all, call)
        else:
            split_work(team, call.segments, attend_to_chosen, call)
            split_work(team, heads, add_skipped, call)
        split_work(team, heads, merge, call)

    return attend
