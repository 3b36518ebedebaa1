"""
Attention of a few queries over float blocks in host memory.

One pass with a running maximum (arXiv:1805.02867), split over tokens as well as heads (Flash-Decoding), partial
results merged by their log-sum-exp in float64. Every key and value is read once, whatever the number of query heads.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from .blocks import BLOCK
from .compiled import jit
from .parallel import share_out
from .tiles import LOG2_E, ROWS, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile

# Masks add the lowest finite float32, which times log2(e) must stay finite: a row of nothing else is not empty.
_LOWEST = np.float32(-2e38)


class Call(NamedTuple):
    """One call of `attend`; `Workspace.attend` says what is in it."""

    query: Any  # float32 [heads, rows, at least key_dim]
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
    share_out(parallel, team, threads, heads, merge_segments, call)


@jit
def _attend_segment(segment, call):
    """Attend to some blocks, counted through all heads of a block before the next: as they lie."""
    segments, heads = call.maxima.shape[:2]
    key_block, value_block = call.keys[0, 0].nbytes, call.values[0, 0].nbytes
    start_segment(segment, call)
    items = (call.num_tokens + BLOCK - 1) // BLOCK * heads
    for item in range(segment * items // segments, (segment + 1) * items // segments):
        block = item // heads
        keys = call.keys.ctypes.data + item * key_block
        values = call.values.ctypes.data + item * value_block
        attend_float_block(segment, item - block * heads, block * BLOCK, keys, values, keys + key_block, call)


@jit
def start_segment(segment, call):
    """Nothing is seen yet."""
    call.maxima[segment] = -np.inf
    call.sums[segment] = 0
    call.partial[segment] = 0


@jit
def attend_float_block(segment, head, start, keys, values, ahead, call):
    """
    Attend to one block of one head.

    start: first token; keys, values: addresses of the block; ahead: of what is read next.
    """
    rows, query_bytes = call.query.shape[1], call.query.shape[2] * 4
    key_dim, width = call.keys.shape[2], call.values.shape[3]
    scores, corrections = call.scores[segment].ctypes.data, call.corrections[segment].ctypes.data
    tokens = min(BLOCK, call.num_tokens - start)
    for row in range(0, rows, ROWS):
        query = call.query[head, row].ctypes.data
        for column in range(0, BLOCK, tile_columns()):
            score_tile(call.keys, query, query_bytes, keys, key_dim, scores, column, values)
        weights_of_tile(segment, head, row, start, call)
        target = call.partial[segment, head, row].ctypes.data
        column = 0
        while column + tile_columns() <= width:
            weigh_tile(call.values, scores, values, tokens, width, column, corrections, target, ahead)
            column += tile_columns()
        while column < width:
            weigh_narrow_tile(call.values, scores, values, tokens, width, column, corrections, target, ahead)
            column += 16


@jit
def weights_of_tile(segment, head, row, start, call):
    """Turn a tile's scores of the block from token `start` on into weights."""
    masked = call.visible.size > 0 or call.bias.size > 0
    all_see = call.num_tokens - call.query_length + 1 if call.causal else call.num_tokens
    factor = numba.float32(call.scale)
    if masked or start + BLOCK > all_see:
        _mask_tile(call.scores[segment], start, row, head, call)
        factor = numba.float32(1)
    state = (segment * call.maxima.shape[1] + head) * call.maxima.shape[2] + row
    softmax_tile(
        call.scores[segment].ctypes.data,
        factor,
        call.maxima.ctypes.data + state * 4,
        call.sums.ctypes.data + state * 4,
        call.corrections[segment].ctypes.data,
    )


@jit
def _mask_tile(scores, start, first_row, head, call):
    """Scale a tile's scores, add the bias, and let minus infinity stand where a query does not see a token."""
    sequence = head // call.num_kv_heads
    visible, bias, scale = call.visible, call.bias, numba.float32(call.scale)
    for tile_row in range(min(ROWS, call.group * call.query_length - first_row)):
        row = first_row + tile_row
        query_index = row % call.query_length
        query_head = head % call.num_kv_heads * call.group + row // call.query_length
        limit = call.num_tokens - call.query_length + 1 + query_index if call.causal else call.num_tokens
        seen = min(max(limit - start, 0), BLOCK)
        for token in range(seen):
            scores[tile_row, token] *= scale
        if bias.size > 0:
            added = bias[
                sequence % bias.shape[0], query_head % bias.shape[1], query_index % bias.shape[2], start : start + seen
            ]
            for token in range(seen):
                biased = scores[tile_row, token] + added[token]
                scores[tile_row, token] = biased if biased == -np.inf else max(biased, _LOWEST)
        if visible.size > 0:
            shown = visible[
                sequence % visible.shape[0],
                query_head % visible.shape[1],
                query_index % visible.shape[2],
                start : start + seen,
            ]
            for token in range(seen):
                if shown[token] == 0:
                    scores[tile_row, token] = -np.inf
        for token in range(seen, BLOCK):
            scores[tile_row, token] = -np.inf


@jit
def merge_segments(head, call):
    """Merge the segments' results of one head by their log-sum-exp."""
    segments, rows, width = call.maxima.shape[0], call.out.shape[1], call.out.shape[2]
    weights = np.empty(segments, np.float64)
    merged = np.empty(width, np.float64)
    for row in range(rows):
        total = weigh_segments(head, row, call, weights)
        merged[:] = 0
        add_segments(head, row, 0, segments, call, weights, merged)
        for column in range(width):
            call.out[head, row, column] = merged[column] / total if total != 0 else 0.0


@jit
def weigh_segments(head, row, call, weights):
    """Write the weight of each segment's result, and the log-sum-exp; returns the sum of all weights of tokens."""
    maxima, sums = call.maxima[:, head, row], call.sums[:, head, row]
    highest = maxima.max()
    # Of log2, see `softmax_tile`. Minus infinity less itself would not be a number.
    base = 0.0 if highest == -np.inf else np.float64(highest)
    total = 0.0
    for segment in range(maxima.size):
        weights[segment] = 2.0 ** (maxima[segment] - base)
        total += weights[segment] * sums[segment]
    call.lse[head, row] = base / LOG2_E + np.log(total)
    return total


@jit
def add_segments(head, row, first, last, call, weights, merged):
    """Add the weighted results of segments `first` to `last`."""
    for segment in range(first, last):
        for column in range(merged.size):
            merged[column] += weights[segment] * call.partial[segment, head, row, column]


def compile_attention(element: np.dtype) -> None:
    """Compile attention over blocks of `element`, or load it from Numba's cache on disk."""
    blocks = numba.from_dtype(element)[:, :, :, ::1]
    attend.compile(signature(Call, {"keys": blocks, "values": blocks}))


def signature(call: type, fields: dict[str, Any]) -> Any:
    """Of a kernel that takes a `call` whose other fields are those of a `Call`, and integers."""
    number, real = numba.int64, numba.float32
    kinds = {
        "query": real[:, :, ::1],
        "causal": numba.boolean,
        "scale": numba.float64,
        "visible": numba.uint8[:, :, :, ::1],
        "bias": real[:, :, :, ::1],
        "scores": real[:, :, ::1],
        "corrections": real[:, ::1],
        "maxima": real[:, :, ::1],
        "sums": real[:, :, ::1],
        "partial": real[:, :, :, ::1],
        "out": real[:, :, ::1],
        "lse": real[:, ::1],
    } | fields
    typed = numba.types.NamedTuple([kinds.get(field, number) for field in call._fields], call)
    return numba.void(number, number, number, typed)
