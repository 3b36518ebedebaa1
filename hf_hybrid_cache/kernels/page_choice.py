"""
Which pages of a sequence matter to a few queries: rated by the index of its keys, and chosen by their share.

What each page of sixteen tokens is worth is found for all heads of a block before the next, as the index lies; then,
for each KV head, the fewest pages that carry the wanted share of the attention.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .attention import call_type, highest_of, is_masked, mask_scores, share, started_segment, taking
from .blocks import BLOCK
from .coded_tiles import score_coded_tile
from .compiled import jit_part
from .folding import SLOTS, find_constants, find_steps, fold_rows, middle_of_codes, round_rows
from .key_index import INDEX_BITS
from .page_tiles import PAGE, PAGES, float_bits, page_tile, scale_scores, scaled_page_tile
from .rotation import rotate
from .tiles import ROWS, tile_columns
from .vector_ir import LANES

# What pages are worth is sorted by the upper bits of a float: eight bins from one power of two to the next.
_DROPPED_BITS = 20
BINS = 2 ** (31 - _DROPPED_BITS)
RUNS = PAGES * PAGES  # of the pages of a block, by its first and its last one
_LARGEST_DIGIT = 127  # of a query as integers
_AHEAD = 4  # records from the one that is read to the one that is asked for
# Of what no row that sees a token adds up to.
_NOTHING = 1e-20


class SelectedCall(NamedTuple):
    """One call of `attend_selected` or `attend_selected_codes`."""

    attention: Any  # a `Call`, or a `CodedCall` whose coded blocks are those that are indexed
    index: Any  # uint8 [indexed blocks or more, heads, bytes], see `key_index`
    first: int  # blocks before the indexed ones
    blocks: int  # that are indexed
    segments: int  # of indexed blocks; those after them are of the others
    is_integer: bool  # take the processor's integer dot products
    rotation: int  # numbers of a key that were rotated together before it was indexed
    mass: float  # the share that is wanted, on average over the rows of a KV head
    most_pages: int  # of all heads; where more are needed, all are read
    units: Any  # uint16 [2, inner]: scales and lows, in bfloat16, that are the same for all of the index
    query: Any  # float32 [heads, rows, inner], rotated; scratch as all but `pages_read`
    folded: Any  # float32 [heads, rows, inner]
    operands: Any  # float32 [heads, rows, inner]
    steps: Any  # float32 [heads, rows]
    constants: Any  # float32 [heads, rows]
    bases: Any  # float32 [heads, rows]: what sums are relative to, see `page_tile`
    page_sums: Any  # float32 [heads, indexed blocks or more, rows, PAGES]
    totals: Any  # float32 [segments, heads, rows, PAGES], of page sums
    row_factors: Any  # float32 [heads, rows]: makes shares of sums
    shares: Any  # float32 [heads, indexed blocks or more, PAGES], added up over rows
    histogram: Any  # float64 [heads, BINS]: shares of the pages whose share has these upper bits
    chosen: Any  # uint8 [indexed blocks or more, heads]: 0, or 1 plus the number of the run of pages that is read
    runs: Any  # int64 [indexed blocks or more, heads]: the chosen ones of a segment, together
    pages_read: Any  # int64 [heads], written


@jit_part
def prepare_rows(head, call):
    """
    Rotate the queries of a head as the keys of the index and round them, and choose the bases of their sums.

    A base is near the highest score of what was attended to before: far higher ones are not to be expected, and if
    there are some, all is read.
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


class Rating(NamedTuple):
    """What rating blocks needs of a call and of its segment, as plain numbers."""

    index: int  # addresses, of the first block and head
    query: int
    operands: int
    steps: int
    constants: int
    bases: int
    totals: int
    sums: int
    record: int  # bytes
    sums_of_head: int  # likewise, from a head to the next
    inner: int
    first: int
    is_integer: bool


@jit_part
def rate_segment(segment, call):
    """Find what the pages of some indexed blocks are worth."""
    heads = call.attention.maxima.shape[1]
    items = share(segment, call.segments, call.blocks * heads)
    plan = started_segment(segment, items, call.attention)
    for head in range(heads):
        for row in range(plan.rows):
            for page in range(PAGES):
                call.totals[segment, head, row, page] = 0
    rating = Rating(
        call.index.ctypes.data,
        call.query.ctypes.data,
        call.operands.ctypes.data,
        call.steps.ctypes.data,
        call.constants.ctypes.data,
        call.bases.ctypes.data,
        call.totals.ctypes.data + segment * heads * plan.rows * PAGES * 4,
        call.page_sums.ctypes.data,
        call.index.shape[2],
        call.page_sums.shape[1] * plan.rows * PAGES * 4,
        call.query.shape[2],
        call.first,
        call.is_integer,
    )
    block = items.start // heads
    head = items.start - block * heads
    for item in range(items.start, items.stop):
        _rate_block(block, head, rating.index + item * rating.record, rating, plan)
        head += 1
        if head == heads:
            block, head = block + 1, 0


@jit_part
def _rate_block(block, head, record, rating, plan):
    """Rate the pages of one block of one head."""
    inner, start = rating.inner, (rating.first + block) * BLOCK
    scales = record + inner * INDEX_BITS // 8 * BLOCK
    means = scales + BLOCK * 2
    for row in range(0, plan.rows, ROWS):
        place = head * plan.rows + row
        query, bases, totals = rating.query + place * inner * 4, rating.bases + place * 4, rating.totals + place * 16
        sums = rating.sums + head * rating.sums_of_head + (block * plan.rows + row) * PAGES * 4
        _score_block(place, record, rating, plan)
        if is_masked(start, plan):
            scale_scores(plan.scores, query, inner * 4, scales, means, inner)
            factor = mask_scores(head, row, start, plan.scores, plan.factor, plan)
            page_tile(plan.scores, factor, bases, totals, sums)
        else:
            scaled_page_tile(plan.scores, query, inner * 4, scales, means, inner, plan.factor, bases, totals, sums)


@jit_part
def _score_block(place, record, rating, plan):
    """Write the products of four rows, from `place` on, with the codes of a block."""
    operand, inner = rating.operands + place * rating.inner * 4, rating.inner
    steps, constants = rating.steps + place * 4, rating.constants + place * 4
    ahead, column = record + _AHEAD * rating.record, 0
    while column + tile_columns() <= BLOCK:
        score_coded_tile(
            INDEX_BITS, rating.is_integer, operand, record, inner, BLOCK, column, steps, constants, plan.corrections,
            plan.scores, BLOCK * 4, ahead,
        )  # fmt: skip
        column += tile_columns()


@jit_part
def choose_pages(head, call):
    """Choose the fewest pages of a head that, with all that is not indexed, carry the wanted share."""
    wanted = _missing_share(head, call)
    if not np.isfinite(wanted):  # nor are shares: all is read, and says so
        for block in range(call.blocks):
            call.chosen[block, head] = 1 + (PAGES - 1)  # from the first page to the last
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


@jit_part
def _missing_share(head, call):
    """
    The share that indexed blocks are to add, summed over rows; infinite where a number is not finite, or a row has seen
    nothing.

    Writes what makes shares of the sums of each row.
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
        wanted += call.mass - rest / total
    return wanted


@jit_part
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


@jit_part
def _edge(head, wanted, call):
    """The lowest bin of which pages are needed, and what share of it."""
    edge = BINS
    while wanted > 0 and edge > 0:
        edge -= 1
        wanted -= call.histogram[head, edge]
    return edge, wanted + (call.histogram[head, edge] if edge < BINS else 0.0)


@jit_part
def gather_runs(segment, call):
    """Write the runs of pages that are read of a segment's blocks, together; returns where they are."""
    items = share(segment, call.segments, call.blocks * call.attention.maxima.shape[1])
    runs, chosen, end = call.runs.ravel(), call.chosen.ravel(), items.start
    for item in items:
        if chosen[item]:
            runs[end] = item * RUNS + chosen[item] - 1
            end += 1
    return runs[items.start : end]


@jit_part
def run_of(run):
    """The block and head of a run, as one number, and its tokens: the first one, and the one after the last."""
    return run // RUNS, run % RUNS // PAGES * PAGE, (run % PAGES + 1) * PAGE


@jit_part
def reads_all(call):
    """Whether more pages are needed than may be read apart from the others; all count as read then."""
    heads, pages = len(call.pages_read), 0
    for head in range(heads):
        pages += call.pages_read[head]
    if pages <= call.most_pages:
        return False
    for head in range(heads):
        call.pages_read[head] = call.blocks * PAGES
    return True


def taking_selected(attention: Any) -> tuple[Any, ...]:
    """The types that a kernel is given with a `SelectedCall` of a call of this type."""
    real = numba.float32
    fields = {
        "attention": attention,
        "index": numba.uint8[:, :, ::1],
        "is_integer": numba.boolean,
        "mass": numba.float64,
        "units": numba.uint16[:, ::1],
        "query": real[:, :, ::1],
        "folded": real[:, :, ::1],
        "operands": real[:, :, ::1],
        "steps": real[:, ::1],
        "constants": real[:, ::1],
        "bases": real[:, ::1],
        "page_sums": real[:, :, :, ::1],
        "totals": real[:, :, :, ::1],
        "row_factors": real[:, ::1],
        "shares": real[:, :, ::1],
        "histogram": numba.float64[:, ::1],
        "chosen": numba.uint8[:, ::1],
        "runs": numba.int64[:, ::1],
        "pages_read": numba.int64[::1],
    }
    return taking(call_type(SelectedCall, fields))
