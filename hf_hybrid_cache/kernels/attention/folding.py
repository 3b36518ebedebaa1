"""
Folding of the scales and minima of quantized blocks into the query, or into the weights, before the product with codes.

For integer dot products the folded numbers are rounded, relative to the largest of their row: to 16 bits for codes of
8 bits, which are multiplied in pairs, and to 8 bits for smaller codes, which are multiplied in fours. The sixteen
numbers of a vector are in the order in which codes come out of the words: 0, 8, 1, 9, ..., or that of `_quad_order`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.code_tiles import BITS, MOST_BITS_OF_QUADS
from ..vector.tiles import ROWS
from ..vector.vector_ir import FLOAT, FLOATS, INT8, INT16, INT64, LANES

_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
# Vectors to fold together, if they divide the inner axis.
_VECTORS_AT_ONCE = 4


def _quad_order(width: int) -> list[int]:
    """The order of a vector's folded numbers if codes come out of the words four at a time, a byte each."""
    places = [
        (word, shift, byte) for word in range(LANES * width // 32) for shift in range(8 // width) for byte in range(4)
    ]
    return [
        word * (16 // width) + shift + byte % 2 * (8 // width) + byte // 2 * (LANES // 2)
        for word, shift, byte in places
    ]


@intrinsic
def fold_rows(
    typing_context: Any,
    rows: Any,
    stride: Any,
    scales: Any,
    minima: Any,
    inner: Any,
    bits: Any,
    middle: Any,
    limit: Any,
    factor: Any,
    folded: Any,
    operand: Any,
    steps: Any,
    constants: Any,
) -> Any:
    """
    Fold scales and minima of one group into four rows, and round the results to integers.

    The product of a row with what codes stand for, times `factor`, is `steps * operand @ codes + constants`. The error
    of rounding is multiplied by the middle code, so the sum of a row's folded numbers stays exact.

    rows: address of float32 rows, `stride` bytes apart, each `[inner]`; scales, minima: addresses of bfloat16
    `[inner]`; bits: of a code; middle: float32, the middle of all codes if numbers are rounded to 8 bits, which loses
    much, or else 0; limit: the largest integer to round to, or 0 for the portable way, which leaves float32; folded:
    address of float32 `[ROWS, inner]`, scratch; operand: of integers or float32 `[ROWS, inner]`, written; steps,
    constants: of float32 `[ROWS]`, written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, stride, scales, minima, inner, bits, middle, limit, factor, folded, operand, steps, constants = arguments
        add, multiply = builder.add, builder.mul
        middle, factor = vec.splat(builder, middle), vec.splat(builder, factor)

        def fold(vectors: int, target: ir.Value, order: Sequence[int]) -> tuple[ir.Value, ir.Value]:
            """Fold all numbers. Returns each row's largest, and the part of its product that codes have no part in."""

            def body(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                results = list(carried)
                for part in range(vectors):
                    vector = add(multiply(index, INT64(vectors)), INT64(part))
                    scale, minimum = (
                        vec.load_vectors(
                            context, builder, types.uint16, add(start, multiply(vector, INT64(LANES * 2))), 1
                        )[0]
                        for start in (scales, minima)
                    )
                    minimum = vec.multiply_add(builder, scale, middle, minimum)
                    for row in range(ROWS):
                        place = add(rows, add(multiply(INT64(row), stride), multiply(vector, INT64(LANES * 4))))
                        number = vec.load(builder, place, FLOATS)
                        product = builder.fmul(number, scale)
                        ordered = vec.shuffle(builder, product, product, order)
                        vec.store(builder, ordered, _place(builder, target, row, inner, vector, 4))
                        results[row] = vec.maximum(builder, vec.absolute(builder, product), results[row])
                        results[ROWS + row] = vec.multiply_add(builder, number, minimum, results[ROWS + row])
                return results

            count = builder.sdiv(inner, INT64(LANES * vectors))
            results = vec.loop(builder, count, [vec.floats(0.0)] * (2 * ROWS), body)
            highest, sums = results[:ROWS], results[ROWS:]
            return vec.fold(builder, highest, vec.maximum), vec.fold(builder, sums, vec.add)

        def rounded(vectors: int, width: int, factors: ir.Value) -> ir.Value:
            """Round the folded numbers for codes of `width` bits. Returns the sum of each row's integers."""
            kind, order = (INT8, _quad_order(width)) if width <= MOST_BITS_OF_QUADS else (INT16, _PAIR_ORDER)

            def body(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                first, results = multiply(index, INT64(vectors)), []
                for row in range(ROWS):
                    places = [
                        _place(builder, folded, row, inner, add(first, INT64(part)), 4) for part in range(vectors)
                    ]
                    of_row = vec.splat_fourth(builder, factors, row)
                    integers = [
                        vec.shifted_integers(builder, vec.load(builder, place, FLOATS), of_row) for place in places
                    ]
                    narrow = vec.narrowed(context, builder, integers, kind, order)
                    vec.store(builder, narrow, _place(builder, operand, row, inner, first, kind.width // 8))
                    results.append(vec.reduced(builder, [carried[row], *integers], ir.IRBuilder.add))
                return results

            count = builder.sdiv(inner, INT64(LANES * vectors))
            totals = vec.loop(builder, count, [vec.ints(0)] * ROWS, body)
            totals = [vec.without_shift(builder, total, multiply(count, INT64(vectors))) for total in totals]
            return builder.sitofp(vec.fold(builder, totals, ir.IRBuilder.add), FLOATS)

        def finish(step: ir.Value, constant: ir.Value) -> None:
            vec.store_four(builder, builder.fmul(step, factor), steps)
            vec.store_four(builder, builder.fmul(constant, factor), constants)

        with builder.if_else(builder.icmp_signed(">", limit, INT64(0))) as (then, otherwise):
            with then:
                limit = builder.sitofp(limit, FLOAT)
                most, least = (vec.splat(builder, each) for each in (limit, builder.fdiv(FLOAT(1.0), limit)))
                for vectors in _at_once(builder, inner):
                    largest, constant = fold(vectors, folded, range(LANES))
                    step = builder.fmul(largest, least)
                    nothing = builder.fcmp_ordered("<", largest, vec.floats(vec.NEGLIGIBLE))
                    factors = builder.select(nothing, vec.floats(0.0), builder.fdiv(most, largest))
                    missing = builder.fmul(step, builder.fneg(middle))
                    for width in BITS:
                        with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                            total = rounded(vectors, width, factors)
                            finish(step, vec.multiply_add(builder, missing, total, constant))
            with otherwise:
                finish(vec.floats(1.0), fold(1, operand, _PAIR_ORDER)[1])
        return context.get_dummy_value()

    kinds = [*[types.int64] * 6, types.float32, types.int64, types.float32, *[types.int64] * 4]
    return types.void(*kinds), generate


def _place(builder: ir.IRBuilder, start: ir.Value, row: int, inner: ir.Value, vector: ir.Value, item: int) -> ir.Value:
    """The address of a vector of a row; a row has `inner` numbers of `item` bytes."""
    numbers = builder.add(builder.mul(INT64(row), inner), builder.mul(vector, INT64(LANES)))
    return builder.add(start, builder.mul(numbers, INT64(item)))


def _at_once(builder: ir.IRBuilder, inner: ir.Value) -> Iterator[int]:
    """Yield the numbers of vectors to take at a time; the code generated for one of them runs."""
    divides = builder.icmp_signed("==", builder.and_(inner, INT64(_VECTORS_AT_ONCE * LANES - 1)), INT64(0))
    for vectors, is_taken in ((_VECTORS_AT_ONCE, divides), (1, builder.not_(divides))):
        with builder.if_then(is_taken):
            yield vectors
