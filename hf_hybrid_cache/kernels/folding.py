"""
Folding: the scales and lows of coded blocks go into the query, or into the weights, before their product with codes.

For integer dot products the folded numbers are rounded, relative to the largest of their row: to 16 bits for codes of
8 bits, which are multiplied in pairs (`pair_dots`), and to 8 for fewer, four at a time (`quad_dots`). Those of a chunk
of sixteen are in the order in which codes come out of the words: 0, 8, 1, 9, ..., or that of `_quad_order`.

Four blocks are folded side by side, in slots. What needs all numbers of a row is done for the rows of all slots at
once, a lane for each: `find_steps` and `find_constants`. A row is `steps * operand @ codes + constants`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .coded_blocks import BITS, CHUNK
from .tiles import ROWS, load_vectors, reduced
from .vector_ir import FLOAT, FLOATS, INT8, INT16, INT64, INTS, LANES

# Codes of so many bits or fewer are multiplied four at a time, with folded numbers of 8 bits.
MOST_BITS_OF_QUADS = 4
# Slots: their rows fill a vector.
SLOTS = LANES // ROWS
_PAIR_ORDER = [lane // 2 + lane % 2 * 8 for lane in range(CHUNK)]
# Chunks that are folded together where the inner axis has whole numbers of them.
_STRIP = 4
ROW_BYTES = LANES * 4


def _quad_order(width: int) -> list[int]:
    """Of the folded numbers of a chunk: that in which codes come out of the words four at a time, a byte each."""
    places = [
        (word, shift, byte) for word in range(CHUNK * width // 32) for shift in range(8 // width) for byte in range(4)
    ]
    return [
        word * (16 // width) + shift + byte % 2 * (8 // width) + byte // 2 * (CHUNK // 2)
        for word, shift, byte in places
    ]


@intrinsic
def fold_rows(
    typing_context: Any,
    rows: Any,
    stride: Any,
    scales: Any,
    lows: Any,
    inner: Any,
    middle: Any,
    limit: Any,
    folded: Any,
    operand: Any,
    highest: Any,
    sums: Any,
) -> Any:
    """
    Fold scales and lows of one group into the four rows of a slot.

    rows: address of float32 rows, `stride` bytes apart, each `[inner]`; scales, lows: addresses of bfloat16 `[inner]`;
    middle: float32, see `middle_of_codes`; limit: the largest integer to round to, or 0 for the portable way; folded:
    address of float32 `[ROWS, inner]`, which is written; operand: likewise, what the portable way writes instead;
    highest: address of float32 `[ROWS, LANES]`: the largest of the lanes; sums: likewise, of what does not depend on
    codes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, stride, scales, lows, inner, middle, limit, folded, operand, highest, sums = arguments
        add, multiply = builder.add, builder.mul
        middle = vec.splat(builder, middle)

        def fold(chunks: int, target: ir.Value, order: Sequence[int]) -> None:
            def fold_chunks(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                results = list(carried)
                for part in range(chunks):
                    chunk = add(multiply(index, INT64(chunks)), INT64(part))
                    scale, low = scale_and_low(context, builder, scales, lows, chunk, middle)
                    for row in range(ROWS):
                        place = add(rows, add(multiply(INT64(row), stride), multiply(chunk, INT64(CHUNK * 4))))
                        number = vec.load(builder, place, FLOATS)
                        product = builder.fmul(number, scale)
                        ordered = vec.shuffle(builder, product, product, order)
                        vec.store(builder, ordered, _place(builder, target, row, inner, chunk, 4))
                        results[row] = vec.maximum(builder, vec.absolute(builder, product), results[row])
                        results[ROWS + row] = vec.multiply_add(builder, number, low, results[ROWS + row])
                return results

            count = builder.sdiv(inner, INT64(CHUNK * chunks))
            results = vec.loop(builder, count, [vec.floats(0.0)] * (2 * ROWS), fold_chunks)
            for row in range(ROWS):
                vec.store(builder, results[row], add(highest, INT64(row * ROW_BYTES)))
                vec.store(builder, results[ROWS + row], add(sums, INT64(row * ROW_BYTES)))

        is_integer = builder.icmp_signed(">", limit, INT64(0))
        with builder.if_else(is_integer) as (then, otherwise):
            with then:
                for chunks in _strips(builder, inner):
                    fold(chunks, folded, range(CHUNK))
            with otherwise:
                fold(1, operand, _PAIR_ORDER)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, *[types.int64] * 5), generate


def scale_and_low(
    context: Any, builder: ir.IRBuilder, scales: ir.Value, lows: ir.Value, chunk: ir.Value, middle: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Of a chunk, bfloat16, as floats; the low is what the middle code stands for."""
    offset = builder.mul(chunk, INT64(CHUNK * 2))
    scale, low = (
        load_vectors(context, builder, types.uint16, builder.add(start, offset), 1)[0] for start in (scales, lows)
    )
    return scale, vec.multiply_add(builder, scale, middle, low)


@intrinsic
def find_steps(typing_context: Any, limit: Any, highest: Any, steps: Any, factors: Any) -> Any:
    """
    Of the rows of all slots: what an integer stands for, and what numbers are multiplied by before they are rounded.

    limit: the largest integer; highest: address of float32 `[SLOTS, ROWS, LANES]`; steps, factors: addresses of float32
    `[SLOTS, ROWS]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        limit, highest, steps, factors = arguments
        largest = fold_slots(builder, highest, FLOATS, vec.maximum)
        limit = builder.sitofp(limit, FLOAT)
        nothing = builder.fcmp_ordered("<", largest, vec.floats(vec.NEGLIGIBLE))
        most, least = (vec.splat(builder, each) for each in (limit, builder.fdiv(FLOAT(1.0), limit)))
        vec.store(builder, builder.fmul(largest, least), steps)
        vec.store(builder, builder.select(nothing, vec.floats(0.0), builder.fdiv(most, largest)), factors)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def round_rows(typing_context: Any, folded: Any, inner: Any, bits: Any, factors: Any, operand: Any, totals: Any) -> Any:
    """
    Round the folded numbers of a slot to the integers that are multiplied with codes of so many bits.

    folded: address of float32 `[ROWS, inner]`; factors: of float32 `[ROWS]`; operand: of integers `[ROWS, inner]`,
    which are written; totals: of int32 `[ROWS, LANES]`: their sums, by lanes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        folded, inner, bits, factors, operand, totals = arguments
        add, multiply = builder.add, builder.mul
        of_rows = [vec.splat(builder, vec.load(builder, add(factors, INT64(row * 4)), FLOAT)) for row in range(ROWS)]

        def round_all(chunks: int, width: int) -> None:
            kind, order = (INT8, _quad_order(width)) if _is_quad(width) else (INT16, _PAIR_ORDER)

            def round_chunks(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                first, results = multiply(index, INT64(chunks)), []
                for row, factor in enumerate(of_rows):
                    places = [_place(builder, folded, row, inner, add(first, INT64(part)), 4) for part in range(chunks)]
                    numbers = [vec.load(builder, place, FLOATS) for place in places]
                    integers = [vec.shifted_integers(builder, each, factor) for each in numbers]
                    narrow = vec.narrowed(context, builder, integers, kind, order)
                    vec.store(builder, narrow, _place(builder, operand, row, inner, first, kind.width // 8))
                    results.append(reduced(builder, [carried[row], *integers], ir.IRBuilder.add))
                return results

            count = builder.sdiv(inner, INT64(CHUNK * chunks))
            results = vec.loop(builder, count, [vec.ints(0)] * ROWS, round_chunks)
            for row, total in enumerate(results):
                total = vec.without_shift(builder, total, multiply(count, INT64(chunks)))
                vec.store(builder, total, add(totals, INT64(row * ROW_BYTES)))

        for width in BITS:
            with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                for chunks in _strips(builder, inner):
                    round_all(chunks, width)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def find_constants(
    typing_context: Any, middle: Any, limit: Any, sums: Any, totals: Any, factor: Any, steps: Any, constants: Any
) -> Any:
    """
    Of the rows of all slots: what their products with codes are multiplied by and what is added, times a factor.

    What rounding leaves out is multiplied with the middle code: so all that a row adds up to is kept.

    middle, factor: float32; sums: address of float32 `[SLOTS, ROWS, LANES]`; totals: of int32 likewise; steps,
    constants: of float32 `[SLOTS, ROWS]`, as `find_steps` leaves the first.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        middle, limit, sums, totals, factor, steps, constants = arguments
        factor, constant = vec.splat(builder, factor), fold_slots(builder, sums, FLOATS, vec.add)

        def finish(step: ir.Value, constant: ir.Value) -> None:
            vec.store(builder, builder.fmul(step, factor), steps)
            vec.store(builder, builder.fmul(constant, factor), constants)

        with builder.if_else(builder.icmp_signed(">", limit, INT64(0))) as (then, otherwise):
            with then:
                step = vec.load(builder, steps, FLOATS)
                missing = builder.fmul(step, builder.fneg(vec.splat(builder, middle)))
                total = fold_slots(builder, totals, INTS, ir.IRBuilder.add)
                finish(step, vec.multiply_add(builder, missing, builder.sitofp(total, FLOATS), constant))
            with otherwise:
                finish(vec.floats(1.0), constant)
        return context.get_dummy_value()

    kinds = [types.float32, *[types.int64] * 3, types.float32, *[types.int64] * 2]
    return types.void(*kinds), generate


@intrinsic
def middle_of_codes(typing_context: Any, bits: Any, limit: Any) -> Any:
    """The middle of all codes, where folded numbers lose much when they are rounded; else zero."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        middle: ir.Value = FLOAT(0.0)
        for width in BITS:
            if _is_quad(width):
                is_width = builder.icmp_signed("==", arguments[0], INT64(width))
                is_rounded = builder.and_(is_width, builder.icmp_signed(">", arguments[1], INT64(0)))
                middle = builder.select(is_rounded, FLOAT((2**width - 1) / 2), middle)
        return middle

    return types.float32(types.int64, types.int64), generate


def fold_slots(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, operation: Any) -> ir.Value:
    """Fold each vector of `[SLOTS, ROWS, LANES]` into one number: a vector `[SLOTS, ROWS]`."""
    places = [builder.add(address, INT64(index * ROW_BYTES)) for index in range(SLOTS * ROWS)]
    return vec.fold_sixteen(builder, [vec.load(builder, place, kind) for place in places], operation)


def _place(builder: ir.IRBuilder, start: ir.Value, row: int, inner: ir.Value, chunk: ir.Value, item: int) -> ir.Value:
    """Where a chunk of a row of `inner` numbers of `item` bytes is."""
    numbers = builder.add(builder.mul(INT64(row), inner), builder.mul(chunk, INT64(CHUNK)))
    return builder.add(start, builder.mul(numbers, INT64(item)))


def _strips(builder: ir.IRBuilder, inner: ir.Value) -> Iterator[int]:
    """How many chunks to take at a time: code is to be generated for each number, and one runs."""
    has_strips = builder.icmp_signed("==", builder.and_(inner, INT64(_STRIP * CHUNK - 1)), INT64(0))
    for chunks, is_taken in ((_STRIP, has_strips), (1, builder.not_(has_strips))):
        with builder.if_then(is_taken):
            yield chunks


def _is_quad(width: int) -> bool:
    return width <= MOST_BITS_OF_QUADS
