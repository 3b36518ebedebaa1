"""
Attention of a few queries over float blocks in host memory.

One pass with a running maximum (arXiv:1805.02867), split over tokens as well as heads (Flash-Decoding), partial
results merged by their log-sum-exp in float64. Every key and value is read once, whatever the number of query heads.
"""

import numba
import numpy as np

from .blocks import BLOCK
from .compiled import jit, jit_parallel
from .tiles import ROWS, score_tile, softmax_tile, tile_columns, weigh_narrow_tile, weigh_tile


@jit_parallel
def attend(
    query,
    keys,
    values,
    num_tokens,
    num_kv_heads,
    group,
    query_length,
    causal,
    scale,
    visible,
    bias,
    scores,
    corrections,
    maxima,
    sums,
    partial,
    out,
    lse,
):
    """
    Attend `query` to the first `num_tokens` of `keys` and `values`, see `Workspace.attend`.

    query : float32 [heads, rows, key_dim]
    keys, values : float32, uint16 or int16 [blocks, heads, key_dim, 64] and [blocks, heads, 64, width]
    visible, bias : uint8 and float32 [batch, query heads, query_length, tokens]; empty if there is no mask
    scores, corrections : float32 [segments, ROWS, 64] and [segments, ROWS], scratch
    maxima, sums, partial : float32 [segments, heads, rows] twice and [segments, heads, rows, width], scratch
    out, lse : float32 [heads, rows, width] and [heads, rows], written
    """
    segments, heads = maxima.shape[:2]
    items = (num_tokens + BLOCK - 1) // BLOCK * heads
    for segment in numba.prange(segments):
        maxima[segment] = -np.inf
        sums[segment] = 0
        partial[segment] = 0
        _attend_segment(
            segment * items // segments,
            (segment + 1) * items // segments,
            query,
            keys,
            values,
            num_tokens,
            num_kv_heads,
            group,
            query_length,
            causal,
            scale,
            visible,
            bias,
            scores[segment],
            corrections[segment],
            maxima[segment],
            sums[segment],
            partial[segment],
        )
    for head in numba.prange(heads):
        _merge(maxima[:, head], sums[:, head], partial[:, head], out[head], lse[head])


@jit
def _attend_segment(
    first,
    last,
    query,
    keys,
    values,
    num_tokens,
    num_kv_heads,
    group,
    query_length,
    causal,
    scale,
    visible,
    bias,
    scores,
    corrections,
    maxima,
    sums,
    partial,
):
    """Attend to the blocks `first` to `last`, counted through all heads of a block before the next: as they lie."""
    heads, rows, key_dim = query.shape
    width = values.shape[3]
    key_block = key_dim * BLOCK * keys.itemsize
    value_block = width * BLOCK * values.itemsize
    masked = visible.size > 0 or bias.size > 0
    all_see = num_tokens - query_length + 1 if causal else num_tokens
    for item in range(first, last):
        block = item // heads
        head = item - block * heads
        start = block * BLOCK
        key_address = keys.ctypes.data + item * key_block
        value_address = values.ctypes.data + item * value_block
        for row in range(0, rows, ROWS):
            state = (head * rows + row) * 4
            for column in range(0, BLOCK, tile_columns()):
                score_tile(
                    keys,
                    query.ctypes.data + state * key_dim,
                    key_address,
                    key_dim,
                    scores.ctypes.data,
                    column,
                    value_address,
                )
            factor = scale
            if masked or start + BLOCK > all_see:
                _mask_tile(
                    scores,
                    scale,
                    start,
                    row,
                    head,
                    num_tokens,
                    num_kv_heads,
                    group,
                    query_length,
                    causal,
                    visible,
                    bias,
                )
                factor = numba.float32(1)
            softmax_tile(
                scores.ctypes.data,
                factor,
                maxima.ctypes.data + state,
                sums.ctypes.data + state,
                corrections.ctypes.data,
            )
            tokens = min(BLOCK, num_tokens - start)
            target = partial.ctypes.data + state * width
            column = 0
            while column + tile_columns() <= width:
                weigh_tile(
                    values,
                    scores.ctypes.data,
                    value_address,
                    tokens,
                    width,
                    column,
                    corrections.ctypes.data,
                    target,
                    key_address + key_block,
                )
                column += tile_columns()
            while column < width:
                weigh_narrow_tile(
                    values,
                    scores.ctypes.data,
                    value_address,
                    tokens,
                    width,
                    column,
                    corrections.ctypes.data,
                    target,
                    key_address + key_block,
                )
                column += 16


@jit
def _mask_tile(
    scores, scale, start, first_row, head, num_tokens, num_kv_heads, group, query_length, causal, visible, bias
):
    """Scale a tile's scores, add the bias, and let minus infinity stand where a query does not see a token."""
    sequence = head // num_kv_heads
    for tile_row in range(min(ROWS, group * query_length - first_row)):
        row = first_row + tile_row
        query_index = row % query_length
        query_head = head % num_kv_heads * group + row // query_length
        limit = num_tokens - query_length + 1 + query_index if causal else num_tokens
        seen = min(max(limit - start, 0), BLOCK)
        for token in range(seen):
            scores[tile_row, token] *= scale
        if bias.size > 0:
            added = bias[
                sequence % bias.shape[0], query_head % bias.shape[1], query_index % bias.shape[2], start : start + seen
            ]
            for token in range(seen):
                scores[tile_row, token] += added[token]
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
def _merge(maxima, sums, partial, out, lse):
    """Merge the segments' results of one head by their log-sum-exp."""
    segments, rows = maxima.shape
    width = out.shape[1]
    weights = np.empty(segments, np.float64)
    merged = np.empty(width, np.float64)
    for row in range(rows):
        highest = maxima[:, row].max()
        # Minus infinity less itself would not be a number.
        base = 0.0 if highest == -np.inf else np.float64(highest)
        total = 0.0
        for segment in range(segments):
            weights[segment] = np.exp(maxima[segment, row] - base)
            total += weights[segment] * sums[segment, row]
        merged[:] = 0
        for segment in range(segments):
            for column in range(width):
                merged[column] += weights[segment] * partial[segment, row, column]
        for column in range(width):
            out[row, column] = merged[column] / total if total != 0 else 0.0
        lse[row] = base + np.log(total)


def compile_attention(element: np.dtype) -> None:
    """Compile attention over blocks of `element`, or load it from Numba's cache on disk."""
    i, real = numba.int64, numba.float32
    blocks = numba.from_dtype(element)[:, :, :, ::1]
    masks = numba.uint8[:, :, :, ::1], real[:, :, :, ::1]
    work = real[:, :, ::1], real[:, ::1], real[:, :, ::1], real[:, :, ::1], real[:, :, :, ::1]
    out = real[:, :, ::1], real[:, ::1]
    attend.compile(numba.void(real[:, :, ::1], blocks, blocks, i, i, i, i, numba.boolean, real, *masks, *work, *out))
