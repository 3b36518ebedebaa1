"""
Attention of a few queries over float blocks in host memory.

The kernel makes one pass with a running maximum (arXiv:1805.02867). Segments split the work over tokens as well as
heads (Flash-Decoding); their partial results are merged by log-sum-exp in float64. Each key and value is read once,
whatever the number of query heads.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import boolean, float32, float64, int64, uint8, uint16

from ..blocks import BLOCK
from ..vector.calls import kernel_call, taking
from ..vector.compiled import Needed, jit, jit_function, jit_inlined
from ..vector.numbers_at import Numbers, address_of, load_numbers, store_numbers
from ..vector.parallel import split_work
from ..vector.rotation import rotate_back
from ..vector.tiles import LOG2_E, ROWS, pointer, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile
from .bfloat16_tiles import score_pairs

# A mask may add the lowest finite float32. Times log2(e) it would be infinite, and a row of only such scores empty.
LOWEST, _LOG2_E = np.float32(-3e38), np.float32(LOG2_E)
_LN_2 = math.log(2)


def _blocks(element: np.dtype) -> Any:
    return numba.from_dtype(element)[:, :, :, ::1]


# One call of `attend`; `Workspace.attend` describes the arguments.
Call = kernel_call(
    "Call",
    __name__,
    {
        "given": int64,  # address of the query [batch, query heads, query_length, key_dim], the last axis contiguous
        "sequence_stride": int64,  # numbers from a sequence of `given`, a head and a query to the next one
        "head_stride": int64,
        "query_stride": int64,
        "is_bfloat16": boolean,  # whether `given` and `written` are bfloat16, not float32
        "written": int64,  # address of contiguous [batch, query heads, query_length, value_dim]; 0 for none
        "value_dim": int64,
        "query": float32[:, :, ::1],  # scratch [heads, rows, at least key_dim]
        "pairs": uint16[:, :, ::1],  # scratch for the query in bfloat16, or empty
        "keys": _blocks,  # [blocks, heads, key_dim, BLOCK]
        "values": _blocks,  # [blocks, heads, BLOCK, width]
        "num_tokens": int64,
        "num_kv_heads": int64,
        "group": int64,
        "query_length": int64,
        "scale": float64,
        "visible": uint8[:, :, :, ::1],  # [batch, query heads, query_length, tokens], or empty
        "bias": float32[:, :, :, ::1],  # [batch, query heads, query_length, tokens], or empty
        "scores": float32[:, :, :, ::1],  # scratch [segments, SLOTS, ROWS, BLOCK]
        "corrections": float32[:, :, ::1],  # scratch [segments, SLOTS, ROWS]
        "maxima": float32[:, :, ::1],  # scratch [segments, heads, rows]
        "sums": float32[:, :, ::1],  # scratch [segments, heads, rows]
        "partial": float32[:, :, :, ::1],  # scratch [segments, heads, rows, width]
        "out": float32[:, :, ::1],  # written [heads, rows, width]
        "lse": float32[:, ::1],  # written [heads, rows]
    },
)


@jit
def attend(team, call):
    """Attend as `call` says, on several threads as `split_work` says."""
    segments, heads = call.maxima.shape[:2]
    take_queries(call)
    split_work(team, segments, _attend_segment, call)
    split_work(team, heads, merge_plain_segments, call)


@jit_function
def take_queries(call):
    """Write the queries that are given to the rows of their KV heads."""
    given, key_dim = Numbers(call.given, call.is_bfloat16), call.keys.shape[2]
    for head in range(call.query.shape[0]):
        for row in range(call.group * call.query_length):
            group, index = row // call.query_length, row % call.query_length
            first = (
                head // call.num_kv_heads * call.sequence_stride
                + (head % call.num_kv_heads * call.group + group) * call.head_stride
                + index * call.query_stride
            )
            load_numbers(given, first, key_dim, call.query[head, row])
            if call.pairs.size > 0:
                bits = numba.carray(pointer(address_of(given, first), np.uint16(0)), key_dim)
                for d in range(key_dim):
                    call.pairs[head, row, d] = bits[d]


@jit_function
def _attend_segment(segment, call):
    """Attend to a segment's blocks, in the order of memory: all heads of a block before the next block."""
    segments, heads = call.maxima.shape[:2]
    items = share(segment, segments, (call.num_tokens + BLOCK - 1) // BLOCK * heads)
    attend_blocks(segment, items, 0, 0, call)


@jit_function
def attend_blocks(segment, items, border, skipped, call):
    """Attend to the blocks `items`. From number `border` on, `skipped` more blocks lie before them in memory."""
    heads, plan = call.maxima.shape[1], started_segment(segment, items, call)
    key_block, value_block = call.keys[0, 0].nbytes, call.values[0, 0].nbytes
    keys, values = call.keys.ctypes.data, call.values.ctypes.data
    for number in items:
        item = number if number < border else number + skipped
        block = item // heads
        key_address, head = keys + item * key_block, item - block * heads
        attend_block(head, block * BLOCK, key_address, values + item * value_block, key_address + key_block, plan)


@jit_inlined
def share(part, parts, items):
    """The items of one part, if `parts` equal parts share all items."""
    return range(part * items // parts, (part + 1) * items // parts)


class Plan(NamedTuple):
    """
    The numbers of a call that a segment needs for each of its blocks.

    Addresses instead of arrays: an array is counted, by atomic instructions, whenever one is taken out of the call.
    """

    element: Any  # 0, of the type of keys and values
    query: int  # address
    pairs: int  # address, 0 for none
    scores: int  # addresses of the segment's part, up to `partial`
    corrections: int
    maxima: int
    sums: int
    partial: int
    rows: int
    query_bytes: int  # bytes of a row of the query
    key_dim: int
    width: int
    num_tokens: int
    num_kv_heads: int
    group: int
    query_length: int
    factor: Any  # float32; 2 to the power of factor * product is a weight
    visible: int  # addresses of the masks, 0 for none
    visible_shape: tuple[int, int, int, int]
    bias: int
    bias_shape: tuple[int, int, int, int]


@jit_inlined
def started_segment(segment, items, call):
    """The plan of a segment that has read no block yet. Heads without a block in it get NaN as their maximum."""
    plan, heads = plan_of(segment, call), call.maxima.shape[1]
    _fill(plan.maxima, heads * plan.rows, np.nan)
    for item in range(items.start, min(items.stop, items.start + heads)):
        row = item % heads * plan.rows
        _fill(plan.maxima + row * 4, plan.rows, -np.inf)
        _fill(plan.sums + row * 4, plan.rows, 0)
        _fill(plan.partial + row * plan.width * 4, plan.rows * plan.width, 0)
    return plan


@jit_inlined
def plan_of(segment, call):
    """The plan of a segment whose maxima, sums and partial results are as they were left."""
    heads, rows, width = call.partial.shape[1:]
    pairs = call.pairs.ctypes.data if call.pairs.size > 0 else 0
    visible = call.visible.ctypes.data if call.visible.size > 0 else 0
    bias = call.bias.ctypes.data if call.bias.size > 0 else 0
    return Plan(
        element=call.keys.dtype.type(0),
        query=call.query.ctypes.data,
        pairs=pairs,
        scores=call.scores[segment].ctypes.data,
        corrections=call.corrections[segment].ctypes.data,
        maxima=call.maxima.ctypes.data + segment * heads * rows * 4,
        sums=call.sums.ctypes.data + segment * heads * rows * 4,
        partial=call.partial.ctypes.data + segment * heads * rows * width * 4,
        rows=call.query.shape[1],
        query_bytes=call.query.shape[2] * 4,
        key_dim=call.keys.shape[2],
        width=call.partial.shape[3],
        num_tokens=call.num_tokens,
        num_kv_heads=call.num_kv_heads,
        group=call.group,
        query_length=call.query_length,
        factor=numba.float32(call.scale * LOG2_E),
        visible=visible,
        visible_shape=call.visible.shape,
        bias=bias,
        bias_shape=call.bias.shape,
    )


@jit_inlined
def _fill(address, count, value):
    """Write `value` to `count` float32 from an address on."""
    numbers = numba.carray(pointer(address, numba.float32(0)), (count,))
    for index in range(count):
        numbers[index] = value


@jit_function
def attend_block(head, start, keys, values, ahead, plan):
    """
    Attend to one block of one head.

    start: first token; keys, values: addresses of the block; ahead: address to prefetch.
    """
    tokens = min(BLOCK, plan.num_tokens - start)
    for row in range(0, plan.rows, ROWS):
        offset = (head * plan.rows + row) * plan.query_bytes
        if plan.pairs != 0:
            query, row_bytes = plan.pairs + offset // 2, plan.query_bytes // 2
            score_pairs(plan.element, query, row_bytes, keys, plan.key_dim, plan.scores, values)
        else:
            query = plan.query + offset
            for column in range(0, BLOCK, tile_columns()):
                score_tile(plan.element, query, plan.query_bytes, keys, plan.key_dim, plan.scores, column, values)
        weights_of_tile(head, row, start, plan)
        weigh_values(head, row, plan.scores, values, tokens, ahead, plan)


@jit_function
def weigh_values(head, row, weights, values, tokens, ahead, plan):
    """Correct the partial results of a tile's rows, and add the weighted values of the first `tokens` tokens."""
    target, column = plan.partial + (head * plan.rows + row) * plan.width * 4, 0
    while column + tile_columns() <= plan.width:
        weigh_tile(plan.element, weights, values, tokens, plan.width, column, plan.corrections, target, ahead)
        column += tile_columns()
    while column < plan.width:
        weigh_narrow_tile(plan.element, weights, values, tokens, plan.width, column, plan.corrections, target, ahead)
        column += 16


@jit_function
def weights_of_tile(head, row, start, plan):
    """Turn the scores of a tile for the block at token `start` into weights."""
    factor, state = mask_scores(head, row, start, plan.scores, plan.factor, plan), (head * plan.rows + row) * 4
    softmax_tile(plan.scores, factor, plan.maxima + state, plan.sums + state, plan.corrections)


@jit_function
def mask_scores(head, row, start, scores, factor, plan):
    """
    If there is a mask, multiply the scores of a tile by `factor` and apply it.

    Returns the factor that the scores still lack.
    """
    if is_masked(start, plan):
        _mask_tile(start, row, head, factor, plan, scores)
        return numba.float32(1)
    return factor


@jit_function
def is_masked(start, plan):
    """Whether a mask applies to the block at token `start`, or it is not full."""
    return plan.visible != 0 or plan.bias != 0 or start + BLOCK > plan.num_tokens


@jit_function
def _mask_tile(start, first_row, head, factor, plan, address):
    """
    Multiply a tile's scores by `factor`, add the bias, and hide the tokens that a query does not see.

    Minus infinity is added, as torch adds a mask, so that a NaN score stays NaN.
    """
    sequence = head // plan.num_kv_heads
    scores = numba.carray(pointer(address, numba.float32(0)), (ROWS, BLOCK))
    visible = numba.carray(pointer(plan.visible, numba.uint8(0)), plan.visible_shape)
    bias = numba.carray(pointer(plan.bias, numba.float32(0)), plan.bias_shape)
    for tile_row in range(min(ROWS, plan.group * plan.query_length - first_row)):
        row = first_row + tile_row
        query_index = row % plan.query_length
        query_head = head % plan.num_kv_heads * plan.group + row // plan.query_length
        stored = min(plan.num_tokens - start, BLOCK)
        for token in range(stored):
            scores[tile_row, token] *= factor
        if plan.bias:
            added = bias[
                sequence % bias.shape[0],
                query_head % bias.shape[1],
                query_index % bias.shape[2],
                start : start + stored,
            ]
            for token in range(stored):
                biased = scores[tile_row, token] + added[token] * _LOG2_E
                scores[tile_row, token] = biased if added[token] == -np.inf else max(biased, LOWEST)
        if plan.visible:
            shown = visible[
                sequence % visible.shape[0],
                query_head % visible.shape[1],
                query_index % visible.shape[2],
                start : start + stored,
            ]
            for token in range(stored):
                if shown[token] == 0:
                    scores[tile_row, token] += -np.inf
        for token in range(stored, BLOCK):
            scores[tile_row, token] = -np.inf


@jit_function
def merge_plain_segments(head, call):
    """Write the result of a head from its segments, all of float blocks."""
    merge_segments(head, call, -1, 1, call.partial[0, 0, :0])


@jit_inlined
def merge_segments(head, call, rotated_segments, size, rotation_matrix):
    """
    Merge the partial results of one head's segments by their log-sum-exp.

    The first `rotated_segments` segments are of values that were multiplied by a matrix and then rotated, `size` of
    their numbers together; -1 for none. `rotation_matrix` is the inverse of the matrix, `[value_dim, value_dim]`, or
    empty for none.
    """
    segments, heads, rows = call.maxima.shape
    width, real = call.out.shape[2], numba.float32(0)
    maxima = numba.carray(pointer(call.maxima.ctypes.data, real), (segments, heads, rows))
    sums = numba.carray(pointer(call.sums.ctypes.data, real), (segments, heads, rows))
    partials, dim, first_row = call.partial.ctypes.data, call.value_dim, head * call.group * call.query_length
    out, lse, written = call.out[head], call.lse[head], Numbers(call.written, call.is_bfloat16)
    merged = np.empty(width, np.float64)
    for row in range(call.group * call.query_length):
        base = highest_of(head, row, maxima)
        total = 0.0
        for column in range(width):
            merged[column] = 0
        for segment in range(segments):
            if segment == rotated_segments:
                rotate_back(merged, dim, size, rotation_matrix)
            if np.isnan(maxima[segment, head, row]):
                continue
            weight = power_of_two(maxima[segment, head, row] - base)
            total += weight * sums[segment, head, row]
            address = partials + ((segment * heads + head) * rows + row) * width * 4
            partial = numba.carray(pointer(address, real), (width,))
            for column in range(width):
                merged[column] += weight * partial[column]
        if rotated_segments == segments:
            rotate_back(merged, dim, size, rotation_matrix)
        # `softmax_tile` keeps maxima of log2.
        lse[row] = base / LOG2_E + np.log(total)
        for column in range(width):
            # A row that sees no token gives zeros, or NaN if a score is NaN, as torch does.
            out[row, column] = merged[column] / total if total != 0 else merged[column]
        if call.written != 0:
            store_numbers(out[row], written, (first_row + row) * dim, dim)


@jit_inlined
def power_of_two(x):
    """2 to the power of a float64 of at most 0, to 1e-11 relative. The library's is slower than the rest of a merge."""
    if not x >= -1000.0:
        return x - x if np.isnan(x) else 0.0
    whole = np.floor(x + 0.5)
    fraction = (x - whole) * _LN_2
    # The series of e^x, at most 0.35 from 0.
    power = 1.0
    for term in range(10, 0, -1):
        power = 1.0 + power * fraction / term
    return power * np.int64((np.int64(whole) + 1023) << 52).view(np.float64)


@jit_function
def highest_of(head, row, maxima):
    """The highest of a row's maxima over the segments; 0 if the row sees no token, because -inf - -inf is NaN."""
    highest = np.float64(-np.inf)
    for segment in range(maxima.shape[0]):
        if maxima[segment, head, row] > highest:
            highest = np.float64(maxima[segment, head, row])
    return 0.0 if highest == -np.inf else highest


def attention_kernels(element: np.dtype) -> list[Needed]:
    """The kernel that attends to blocks of `element`."""
    return [(attend, taking(Call, element))]
