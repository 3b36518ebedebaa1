"""The splits of a call, merged by their log-sum-exp on the device, in Triton."""

import triton
import triton.language as tl

# Parts that a program looks at together, and columns of the map.
_PARTS = tl.constexpr(64)
_COLUMNS = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_rows", "heads", "num_splits", "map_step"])
def merge_kernel(
    outs,
    lse,
    result_map,
    merged,
    num_rows,
    heads,
    num_splits,
    map_step,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    IS_MAPPED: tl.constexpr,
):
    """See `splits.merged`; the program of one row of one KV head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    outs += row * num_splits * VALUE_DIM
    lse += row * num_splits
    merged += row * VALUE_DIM
    columns = tl.arange(0, VALUE_TILE)
    is_column = columns < VALUE_DIM
    top = tl.load(lse + num_splits - 1)  # the last split has the tokens in full precision
    own = tl.full([], 1.0, tl.float32)
    total = tl.full([], 1.0, tl.float32)
    quantized = tl.zeros([VALUE_TILE], tl.float32)
    for start in range(0, num_splits - 1, _PARTS):
        splits = start + tl.arange(0, _PARTS)
        is_part = splits < num_splits - 1
        some = tl.load(lse + splits, mask=is_part, other=float("-inf"))
        higher = tl.maximum(top, tl.max(some, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrunk = tl.exp(some - base), tl.where(top == higher, 1.0, tl.exp(top - base))
        at = outs + splits[:, None] * VALUE_DIM + columns[None, :]
        values = tl.load(at, mask=is_part[:, None] & is_column[None, :], other=0.0)
        quantized = quantized * shrunk + tl.sum(weights[:, None] * values, axis=0)
        own, total, top = own * shrunk, total * shrunk + tl.sum(weights, axis=0), higher
    full = outs + (num_splits - 1) * VALUE_DIM
    if IS_MAPPED:
        result_map += row // num_rows % heads * map_step
        for first in range(0, VALUE_DIM, _COLUMNS):
            some_columns = first + tl.arange(0, _COLUMNS)
            is_some = some_columns < VALUE_DIM
            mapping = tl.load(
                result_map + columns[:, None] * VALUE_DIM + some_columns[None, :],
                mask=is_column[:, None] & is_some[None, :],
                other=0.0,
            )
            result = tl.sum(quantized[:, None] * mapping, axis=0)
            result += own * tl.load(full + some_columns, mask=is_some, other=0.0)
            tl.store(merged + some_columns, (result / total).to(merged.dtype.element_ty), mask=is_some)
    else:
        result = quantized + own * tl.load(full + columns, mask=is_column, other=0.0)
        tl.store(merged + columns, (result / total).to(merged.dtype.element_ty), mask=is_column)
