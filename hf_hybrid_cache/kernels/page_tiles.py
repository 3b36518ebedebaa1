"""What a block's pages are worth to four query rows: the steps that choose what attention reads."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .blocks import BLOCK
from .tiles import LOG2_E, ROWS, reduced
from .vector_ir import FLOAT, FLOATS, INT32, INT64, LANES

# Tokens of a page: those of one vector, and of a chunk of coded values.
PAGE = LANES
PAGES = BLOCK // PAGE


@intrinsic
def page_tile(
    typing_context: Any, scores: Any, scale: Any, bases: Any, sums: Any, page_bases: Any, page_sums: Any
) -> Any:
    """
    Add up what each page of a block is worth to each row: 2 to the power of its scores, relative to a running base.

    The base is the smallest whole number that no score so far is above, so that sums of blocks with other bases are
    compared by powers of two. Powers are rough, to 1e-4.

    scores: address of float32 `[ROWS, BLOCK]`; scale: of the scores; bases, sums: addresses of float32 `[ROWS]`, of all
    blocks so far, raised to cover this one; page_bases: address of float32 `[ROWS]`, page_sums: of float32
    `[ROWS, PAGES]`, written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, scale, bases, sums, page_bases, page_sums = arguments
        factor = vec.splat(builder, builder.fmul(scale, ir.Constant(FLOAT, float(np.float32(LOG2_E)))))
        scaled = [
            [
                builder.fmul(vec.load(builder, builder.add(scores, INT64((row * BLOCK + first) * 4)), FLOATS), factor)
                for first in range(0, BLOCK, PAGE)
            ]
            for row in range(ROWS)
        ]
        highest = vec.fold(builder, [reduced(builder, row, vec.maximum) for row in scaled], vec.maximum)
        old = vec.load_four(builder, bases)
        new = vec.maximum(builder, vec.call(builder, "llvm.ceil.v16f32", FLOATS, highest), old)
        vec.store_four(builder, new, bases)
        vec.store_four(builder, new, page_bases)
        nothing = builder.fcmp_ordered("==", new, vec.floats(float("-inf")))
        base = builder.select(nothing, vec.floats(0.0), new)
        rows = []
        for row, vectors in enumerate(scaled):
            row_base = vec.splat_fourth(builder, base, row)
            powers = [
                vec.exp2(builder, builder.fsub(vector, row_base), vec.ROUGH_EXP2_COEFFICIENTS) for vector in vectors
            ]
            rows.append(vec.fold(builder, powers, vec.add))  # a page in each four lanes
        fourths = range(0, LANES, 4)
        pairs = [
            vec.shuffle(builder, rows[row], rows[row + 1], [*fourths, *(LANES + lane for lane in fourths)])
            for row in range(0, ROWS, 2)
        ]
        added = vec.shuffle(builder, pairs[0], pairs[1], range(LANES))
        vec.store(builder, added, page_sums)
        for distance in (1, 2):
            added = builder.fadd(added, vec.shuffle(builder, added, added, [lane ^ distance for lane in range(LANES)]))
        before = builder.fmul(vec.load_four(builder, sums), vec.exp2(builder, builder.fsub(old, base)))
        vec.store_four(builder, builder.fadd(before, added), sums)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 4), generate


@intrinsic
def hide_pages(typing_context: Any, scores: Any, first: Any, end: Any) -> Any:
    """
    Let the scores of all pages but those from `first` to `end` be minus infinity, before they are scaled.

    scores: address of float32 `[ROWS, BLOCK]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores, first, end = arguments
        for page in range(PAGES):
            is_before = builder.icmp_signed("<", INT64(page), first)
            with builder.if_then(builder.or_(is_before, builder.icmp_signed(">=", INT64(page), end))):
                for row in range(ROWS):
                    place = builder.add(scores, INT64((row * BLOCK + page * PAGE) * 4))
                    vec.store(builder, vec.floats(float("-inf")), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 to the power of a float32 that is a whole number of at most 0; 0 below -126."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        (exponent,) = arguments
        is_some = builder.fcmp_ordered(">=", exponent, ir.Constant(FLOAT, -126.0))
        limited = builder.select(is_some, exponent, ir.Constant(FLOAT, -127.0))
        bits = builder.shl(builder.add(builder.fptosi(limited, INT32), INT32(127)), INT32(23))
        return builder.bitcast(bits, FLOAT)

    return types.float32(types.float32), generate


@intrinsic
def float_bits(typing_context: Any, number: Any) -> Any:
    """The bits of a float32, which for numbers of at least 0 are in the order of the numbers."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.zext(builder.bitcast(arguments[0], INT32), INT64)

    return types.int64(types.float32), generate
