"""
Attention of a few queries over float blocks in host memory.

One pass with a running maximum (arXiv:1805.02867), split over tokens as well as heads (Flash-Decoding), partial
results merged by their log-sum-exp in float64. Every key and value is read once, whatever the number of query heads.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from .bfloat16_tiles import score_pairs
from .blocks import BLOCK
from .compiled import Needed, jit, jit_inlined, jit_part
from .parallel import share_out
from .rotation import rotate_back
from .tiles import LOG2_E, ROWS, pointer, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile

# Masks add the lowest finite float32, which times log2(e) would be infinite: a row of nothing else is not empty.
LOWEST, _LOG2_E = np.float32(-3e38), np.float32(LOG2_E)
_LN_2 = math.log(2)


class Call(NamedTuple):
    """One call of `attend`; `Workspace.attend` says what is in it."""

    query: Any  # float32 [heads, rows, at least key_dim]
    pairs: Any  # uint16, the same in bfloat16, or empty
    keys: Any  # float32, uint16 or int16 [blocks, heads, key_dim, 64]
    values: Any  # the same [blocks, heads, 64, width]
    num_tokens: int
    num_kv_heads: int
    group: int
    query_length: int
    causal: bool
    scale: float
    visible: Any  # uint8 [batch, query heads, query_length, tokens], or empty
    bias: Any  # float32 likewise
    scores: Any  # float32 [segments, ROWS, 64], scratch as all up to `partial`
    corrections: Any  # float32 [segments, ROWS]
    maxima: Any  # float32 [segments, heads, rows]
    sums: Any  # float32 [segments, heads, rows]
    partial: Any  # float32 [segments, heads, rows, width]
    out: Any  # float32 [heads, rows, width], written
    lse: Any  # float32 [heads, rows], written


@jit
def attend(parallel, team, threads, call):
    """Attend as `call` says, on several threads as `share_out` says."""
    segments, heads = call.maxima.shape[:2]
    share_out(parallel, team, threads, segments, _attend_segment, call)
    share_out(parallel, team, threads, heads, _merge_segments, call)


@jit_part
def _attend_segment(segment, call):
    """Attend to some blocks, counted through all heads of a block before the next: as they lie."""
    segments, heads = call.maxima.shape[:2]
    items = share(segment, segments, (call.num_tokens + BLOCK - 1) // BLOCK * heads)
    attend_blocks(segment, items, 0, 0, call)


@jit_part
def attend_blocks(segment, items, border, skipped, call):
    """Attend to blocks of heads by number; `skipped` of them are left out where number `border` would be."""
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
    """The items of one of `parts` that are as large as each other."""
    return range(part * items // parts, (part + 1) * items // parts)


class Plan(NamedTuple):
    """
    What a segment needs of a call for each of its blocks, as plain numbers.

    Arrays would be counted up and down, by atomic instructions, whenever one is taken out of the call.
    """

    element: Any  # 0, of the type of keys and values
    query: int  # addresses, those after the next one of what belongs to the segment
    pairs: int  # 0 if there are none
    scores: int
    corrections: int
    maxima: int
    sums: int
    partial: int
    rows: int
    query_bytes: int  # of a row
    key_dim: int
    width: int
    num_tokens: int
    all_see: int  # tokens that the first query sees
    num_kv_heads: int
    group: int
    query_length: int
    causal: bool
    factor: Any  # float32: makes powers of two of products
    visible: int  # addresses of the masks, 0 where there is none, and their sizes
    visible_shape: tuple[int, int, int, int]
    bias: int
    bias_shape: tuple[int, int, int, int]


@jit_inlined
def started_segment(segment, items, call):
    """The plan of a segment that has seen nothing yet. Heads with none of its items have no maximum: not a number."""
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
    """The plan of a segment."""
    heads, rows, width = call.partial.shape[1:]
    return Plan(
        call.keys.dtype.type(0),
        call.query.ctypes.data,
        call.pairs.ctypes.data if call.pairs.size > 0 else 0,
        call.scores[segment].ctypes.data,
        call.corrections[segment].ctypes.data,
        call.maxima.ctypes.data + segment * heads * rows * 4,
        call.sums.ctypes.data + segment * heads * rows * 4,
        call.partial.ctypes.data + segment * heads * rows * width * 4,
        call.query.shape[1],
        call.query.shape[2] * 4,
        call.keys.shape[2],
        call.partial.shape[3],
        call.num_tokens,
        call.num_tokens - call.query_length + 1 if call.causal else call.num_tokens,
        call.num_kv_heads,
        call.group,
        call.query_length,
        call.causal,
        numba.float32(call.scale * LOG2_E),
        call.visible.ctypes.data if call.visible.size > 0 else 0,
        call.visible.shape,
        call.bias.ctypes.data if call.bias.size > 0 else 0,
        call.bias.shape,
    )


@jit_inlined
def _fill(address, count, value):
    """Write `value` into some float32."""
    numbers = numba.carray(pointer(address, numba.float32(0)), (count,))
    for index in range(count):
        numbers[index] = value


@jit_part
def attend_block(head, start, keys, values, ahead, plan):
    """
    Attend to one block of one head.

    start: first token; keys, values: addresses of the block; ahead: of what is read next.
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


@jit_part
def weigh_values(head, row, weights, values, tokens, ahead, plan):
    """Add the first tokens of some values to what is summed up of a tile's rows, which is corrected before."""
    target, column = plan.partial + (head * plan.rows + row) * plan.width * 4, 0
    while column + tile_columns() <= plan.width:
        weigh_tile(plan.element, weights, values, tokens, plan.width, column, plan.corrections, target, ahead)
        column += tile_columns()
    while column < plan.width:
        weigh_narrow_tile(plan.element, weights, values, tokens, plan.width, column, plan.corrections, target, ahead)
        column += 16


@jit_part
def weights_of_tile(head, row, start, plan):
    """Turn a tile's scores of the block from token `start` on into weights."""
    factor, state = mask_scores(head, row, start, plan.scores, plan.factor, plan), (head * plan.rows + row) * 4
    softmax_tile(plan.scores, factor, plan.maxima + state, plan.sums + state, plan.corrections)


@jit_part
def mask_scores(head, row, start, scores, factor, plan):
    """
    Mask a tile's scores where there is a mask, times the factor that makes powers of two of them.

    Returns what they are still to be multiplied by.
    """
    if is_masked(start, plan):
        _mask_tile(start, row, head, factor, plan, scores)
        return numba.float32(1)
    return factor


@jit_part
def is_masked(start, plan):
    """Whether there is a mask for the block from token `start` on."""
    return plan.visible != 0 or plan.bias != 0 or start + BLOCK > plan.all_see


@jit_part
def _mask_tile(start, first_row, head, factor, plan, address):
    """
    Multiply a tile's scores by a factor, add the bias, and minus infinity where a query does not see a token.

    Added, as torch adds a mask, so that a score that is not a number stays one.
    """
    sequence = head // plan.num_kv_heads
    scores = numba.carray(pointer(address, numba.float32(0)), (ROWS, BLOCK))
    visible = numba.carray(pointer(plan.visible, numba.uint8(0)), plan.visible_shape)
    bias = numba.carray(pointer(plan.bias, numba.float32(0)), plan.bias_shape)
    for tile_row in range(min(ROWS, plan.group * plan.query_length - first_row)):
        row = first_row + tile_row
        query_index = row % plan.query_length
        query_head = head % plan.num_kv_heads * plan.group + row // plan.query_length
        limit = plan.num_tokens - plan.query_length + 1 + query_index if plan.causal else plan.num_tokens
        seen, stored = min(max(limit - start, 0), BLOCK), min(plan.num_tokens - start, BLOCK)
        for token in range(stored):
            scores[tile_row, token] *= factor
        if plan.bias:
            added = bias[
                sequence % bias.shape[0], query_head % bias.shape[1], query_index % bias.shape[2], start : start + seen
            ]
            for token in range(seen):
                biased = scores[tile_row, token] + added[token] * _LOG2_E
                scores[tile_row, token] = biased if added[token] == -np.inf else max(biased, LOWEST)
        if plan.visible:
            shown = visible[
                sequence % visible.shape[0],
                query_head % visible.shape[1],
                query_index % visible.shape[2],
                start : start + seen,
            ]
            for token in range(seen):
                if shown[token] == 0:
                    scores[tile_row, token] += -np.inf
        for token in range(seen, stored):
            scores[tile_row, token] += -np.inf
        for token in range(stored, BLOCK):
            scores[tile_row, token] = -np.inf


@jit_part
def _merge_segments(head, call):
    merge_segments(head, call, 0, 0, 1, call.partial[0, 0, :0])


@jit_inlined
def merge_segments(head, call, rotated_segments, dim, size, mixing):
    """
    Merge the segments' results of one head by their log-sum-exp.

    Those of the first `rotated_segments` are of values that were mixed and then rotated, `size` of their `dim` numbers
    together; `mixing` undoes the first, `[dim, dim]`, or is empty.
    """
    segments, heads, rows = call.maxima.shape
    width, real = call.out.shape[2], numba.float32(0)
    maxima = numba.carray(pointer(call.maxima.ctypes.data, real), (segments, heads, rows))
    sums = numba.carray(pointer(call.sums.ctypes.data, real), (segments, heads, rows))
    partials = call.partial.ctypes.data
    out, lse = call.out[head], call.lse[head]
    merged = np.empty(width, np.float64)
    for row in range(rows):
        base = highest_of(head, row, maxima)
        total = 0.0
        for column in range(width):
            merged[column] = 0
        for segment in range(segments):
            if segment == rotated_segments:
                rotate_back(merged, dim, size, mixing)
            if np.isnan(maxima[segment, head, row]):
                continue
            weight = power_of_two(maxima[segment, head, row] - base)
            total += weight * sums[segment, head, row]
            address = partials + ((segment * heads + head) * rows + row) * width * 4
            partial = numba.carray(pointer(address, real), (width,))
            for column in range(width):
                merged[column] += weight * partial[column]
        if rotated_segments == segments:
            rotate_back(merged, dim, size, mixing)
        # Of log2, see `softmax_tile`.
        lse[row] = base / LOG2_E + np.log(total)
        for column in range(width):
            # Of no token that is seen: zeros, or what is not a number, as of torch.
            out[row, column] = merged[column] / total if total != 0 else merged[column]


@jit_inlined
def power_of_two(x):
    """Of a float64 of at most 0, to 1e-11 relative: a library's takes longer than all the rest of a merge."""
    if not x >= -1000.0:
        return x - x if np.isnan(x) else 0.0
    whole = np.floor(x + 0.5)
    fraction = (x - whole) * _LN_2
    # The series of e^x, at most 0.35 from 0.
    power = 1.0
    for term in range(10, 0, -1):
        power = 1.0 + power * fraction / term
    return power * np.int64((np.int64(whole) + 1023) << 52).view(np.float64)


@jit_part
def highest_of(head, row, maxima):
    """The highest of the segments' maxima; 0 if no token is seen, as minus infinity less itself is not a number."""
    highest = np.float64(-np.inf)
    for segment in range(maxima.shape[0]):
        if maxima[segment, head, row] > highest:
            highest = np.float64(maxima[segment, head, row])
    return 0.0 if highest == -np.inf else highest


def attention_kernels(element: np.dtype) -> list[Needed]:
    """What attends to blocks of `element`."""
    return [(attend, taking(plain_call_type(element)))]


def taking(call: Any) -> tuple[Any, ...]:
    """The types that a kernel is given with a call of this type."""
    return numba.int64, numba.int64, numba.int64, call


def plain_call_type(element: np.dtype) -> Any:
    """Of a `Call` with blocks of `element`."""
    blocks = numba.from_dtype(element)[:, :, :, ::1]
    return call_type(Call, {"keys": blocks, "values": blocks})


def call_type(call: type, fields: dict[str, Any]) -> Any:
    """Of a `call` whose other fields are those of a `Call`, and integers."""
    number, real = numba.int64, numba.float32
    kinds = {
        "query": real[:, :, ::1],
        "pairs": numba.uint16[:, :, ::1],
        "causal": numba.boolean,
        "scale": numba.float64,
        "visible": numba.uint8[:, :, :, ::1],
        "bias": real[:, :, :, ::1],
        "scores": real[:, :, :, ::1],
        "corrections": real[:, :, ::1],
        "maxima": real[:, :, ::1],
        "sums": real[:, :, ::1],
        "partial": real[:, :, :, ::1],
        "out": real[:, :, ::1],
        "lse": real[:, ::1],
    } | fields
    return numba.types.NamedTuple([kinds.get(field, number) for field in call._fields], call)
