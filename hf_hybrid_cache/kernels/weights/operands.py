"""
Tokens as products take them: gated, or rounded to integers for products with the codes of weights.

Few tokens are rounded to 16 bits of the largest number of each group of columns. If the processor adds four products of
8-bit numbers in one instruction, an integer is two signed digits of 8 bits. Four columns whose codes are bytes of one
word have their upper digits side by side, then their lower digits.

Many tokens are rounded to 8 bits between the least and the largest number of each strip: a number is about
`step * (q + zero)`, q of 8 bits with a sign and `zero` an integer.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..forms.panels import STRIP, for_width, order_of_quads
from ..vector import vector_ir as vec
from ..vector.compiled import jit_function
from ..vector.numbers_at import Numbers, address_of, load_numbers
from ..vector.processor import has_gemm
from ..vector.vector_ir import FLOAT, INT8, INT16, INT32, INT64, INTS, LANES, LOG2_E, load_vectors, reduced

# Degree of the power of two in the gate, see `vector_ir.exp2`.
_DEGREE = 6
# The largest integer of two signed digits.
_LARGEST = 127 * 256 + 127.0
# Steps between the least and the largest integer of 8 bits, less one because both ends are rounded.
_STEPS = 254.0
# With a larger zero, 8 bits would be finer than float32 needs.
_LARGEST_ZERO = 2.0**15
_INFINITE = 0x7F800000
# `load(index)` gives sixteen numbers of a group as floats.
_Load = Callable[[ir.Value], ir.Value]


@intrinsic
def write_gated(typing_context: Any, gate: Any, up: Any, is_bfloat16: Any, columns: Any, out: Any) -> Any:
    """
    Write `gate * sigmoid(gate) * up`; of bfloat16 as torch does, which rounds each product.

    gate, up, out: addresses of float32 or bfloat16 `[columns]`; columns: at least 1. Up to fifteen numbers are read
    after each, and written.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        gate_at, up_at, is_bfloat16, columns, out = arguments
        add, multiply = builder.add, builder.mul

        def run(kind: Any) -> None:
            item = vec.ITEM_BYTES[kind]

            def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                offset = multiply(index, INT64(LANES * item))
                gate, up = (load_vectors(context, builder, kind, add(at, offset), 1)[0] for at in (gate_at, up_at))
                size = vec.absolute(builder, gate)
                # The power of -|gate| cannot overflow; the numerator makes it the sigmoid of either sign.
                power = vec.exp2(context, builder, builder.fmul(size, vec.floats(-LOG2_E)), _DEGREE)
                numerator = builder.select(builder.fcmp_ordered("<", gate, vec.floats(0.0)), power, vec.floats(1.0))
                sigmoid = builder.fdiv(numerator, builder.fadd(power, vec.floats(1.0)))
                gated = vec.rounded_to(builder, builder.fmul(gate, sigmoid), kind)
                vec.store_as(builder, builder.fmul(gated, up), kind, add(out, offset))
                return carried

            vec.loop(builder, builder.sdiv(add(columns, INT64(LANES - 1)), INT64(LANES)), [], step)

        vec.of_either_type(builder, is_bfloat16, run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, types.int64, types.int64), generate


@jit_function
def whole_group(numbers, first, count, scratch):
    """A run of numbers, as many as `scratch` has: there, with zeros after them, if only `count` are left."""
    address, is_bfloat16 = address_of(numbers, first), numbers.is_bfloat16
    if count < scratch.size:
        scratch[:] = 0
        if count > 0:
            load_numbers(numbers, first, count, scratch)
        address, is_bfloat16 = np.int64(scratch.ctypes.data), False
    return Numbers(address, is_bfloat16)


@intrinsic
def round_group(
    typing_context: Any, bits: Any, numbers: Any, is_bfloat16: Any, columns: Any, integers: Any, step: Any, total: Any
) -> Any:
    """
    Round the numbers of a group to multiples of a step: write the integers, the step and the sum of the multiples.

    bits: of a code of the weight; numbers: address of float32 or bfloat16 `[columns]`, a multiple of sixteen; integers:
    address of int16 `[columns]`, or as many pairs of digits; step, total: addresses of a float32. Step and total are
    NaN if a number is infinite or NaN.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, numbers, is_bfloat16, columns, integers, step_at, total_at = arguments
        vectors = builder.sdiv(columns, INT64(LANES))

        def store(index: ir.Value, nearest: ir.Value) -> None:
            place = builder.add(integers, builder.mul(index, INT64(LANES * 2)))
            if has_gemm():
                for_width(builder, bits, lambda width: vec.store(builder, _digits(builder, nearest, width), place))
            else:
                vec.store(builder, builder.trunc(nearest, ir.VectorType(INT16, LANES)), place)

        def run(load: _Load) -> None:
            largest, is_finite = _largest(builder, load, vectors)
            factor = _factor(builder, _LARGEST, largest, is_finite)
            total = _round(builder, load, vectors, factor, store)
            step = builder.select(is_finite, builder.fdiv(largest, FLOAT(_LARGEST)), FLOAT(float("nan")))
            vec.store(builder, step, step_at)
            vec.store(builder, builder.fmul(step, total), total_at)

        _of_either_kind(context, builder, numbers, is_bfloat16, run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, *[types.int64] * 4), generate


@intrinsic
def round_strip(
    typing_context: Any, bits: Any, numbers: Any, is_bfloat16: Any, integers: Any, step: Any, stride: Any
) -> Any:
    """
    Write the 8-bit integers of a strip of a token, and its step, its total and its zero, each a float32.

    bits: of a code of the weight; numbers: address of float32 or bfloat16 `[STRIP]`; integers: address of int8
    `[STRIP]`, in the order of the codes; step: address of the step. The total, which is the sum of the multiples of the
    step, and the zero, as a multiple of it, follow, each after `stride` bytes. All three are NaN if a number is
    infinite or NaN.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        bits, numbers, is_bfloat16, integers, step_at, stride = arguments

        def run(load: _Load) -> None:
            vectors = [load(INT64(index)) for index in range(STRIP // LANES)]
            high, minus_minimum = _extremes(builder, vectors)
            largest = _larger(builder, high, minus_minimum)
            # Multiply before the sum, which may overflow.
            part = FLOAT(1 / _STEPS)
            step = builder.fadd(builder.fmul(high, part), builder.fmul(minus_minimum, part))
            step = _larger(builder, step, builder.fmul(largest, FLOAT(1 / _LARGEST_ZERO)))
            is_finite = _are_finite(builder, vectors)
            factor = _factor(builder, 1.0, step, is_finite)
            minimum = vec.splat(builder, builder.fneg(minus_minimum))
            zeros = builder.add(vec.nearest_integers(builder, minimum, factor), vec.ints(128))
            nearest = [vec.nearest_integers(builder, vector, factor) for vector in vectors]
            narrow = [builder.trunc(builder.sub(each, zeros), ir.VectorType(INT8, LANES)) for each in nearest]

            def store(width: int) -> None:
                order = itertools.chain(*order_of_quads(width, STRIP))
                vec.store(builder, vec.shuffle(builder, narrow[0], narrow[1], order), integers)

            for_width(builder, bits, store)
            total = _total(builder, reduced(builder, nearest, ir.IRBuilder.add))
            step = builder.select(is_finite, step, FLOAT(float("nan")))
            zero = builder.sitofp(builder.extract_element(zeros, INT32(0)), FLOAT)
            for index, number in enumerate((FLOAT(1.0), total, zero)):
                place = builder.add(step_at, builder.mul(INT64(index), stride))
                vec.store(builder, builder.fmul(step, number), place)

        _of_either_kind(context, builder, numbers, is_bfloat16, run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, *[types.int64] * 3), generate


def _of_either_kind(
    context: Any, builder: ir.IRBuilder, numbers: ir.Value, is_bfloat16: ir.Value, run: Callable[[_Load], None]
) -> None:
    """Generate code by `run(load)` for bfloat16 and for float32 at the address `numbers`; one runs."""

    def run_with(kind: Any) -> None:
        def load(index: ir.Value) -> ir.Value:
            place = builder.add(numbers, builder.mul(index, INT64(LANES * vec.ITEM_BYTES[kind])))
            return load_vectors(context, builder, kind, place, 1)[0]

        run(load)

    vec.of_either_type(builder, is_bfloat16, run_with)


def _largest(builder: ir.IRBuilder, load: _Load, vectors: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The largest magnitude of the numbers, and whether it is finite."""

    def larger(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        # Compare bits: those of infinity and NaN are larger than those of any finite number.
        size = builder.and_(builder.bitcast(load(index), INTS), vec.ints(0x7FFFFFFF))
        return [builder.select(builder.icmp_unsigned(">", size, carried[0]), size, carried[0])]

    [sizes] = vec.loop(builder, vectors, [vec.ints(0)], larger)
    size = vec.call(builder, "llvm.vector.reduce.umax.v16i32", INT32, sizes)
    return builder.bitcast(size, FLOAT), builder.icmp_unsigned("<", size, INT32(_INFINITE))


def _extremes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The largest number, and the negative of the least number, by the same instructions."""
    turned = [builder.fneg(vector) for vector in vectors]
    high, minus_minimum = (reduced(builder, each, vec.maximum) for each in (vectors, turned))
    half = LANES // 2
    firsts, seconds = (
        [*range(half), *range(LANES, LANES + half)],
        [*range(half, LANES), *range(LANES + half, 2 * LANES)],
    )
    both = vec.maximum(builder, *(vec.shuffle(builder, high, minus_minimum, lanes) for lanes in (firsts, seconds)))
    for distance in (4, 2, 1):
        lanes = [lane ^ distance for lane in range(LANES)]
        both = vec.maximum(builder, both, vec.shuffle(builder, both, both, lanes))
    return builder.extract_element(both, INT32(0)), builder.extract_element(both, INT32(half))


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _are_finite(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Whether all numbers are finite, by their bits: comparisons of NaN are not reliable in compiled code."""
    sizes = [builder.and_(builder.bitcast(each, INTS), vec.ints(_INFINITE)) for each in vectors]
    are = [builder.icmp_unsigned("<", size, vec.ints(_INFINITE)) for size in sizes]
    every = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(reduced(builder, are, ir.IRBuilder.and_), every), every(-1))


def _factor(builder: ir.IRBuilder, integer: float, number: ir.Value, is_finite: ir.Value) -> ir.Value:
    """The factor, in all lanes, that makes `number` the integer; 0 if it is negligible, or `is_finite` is false."""
    counts = builder.and_(is_finite, builder.fcmp_ordered(">", number, FLOAT(vec.NEGLIGIBLE)))
    return vec.splat(builder, builder.select(counts, builder.fdiv(FLOAT(integer), number), FLOAT(0.0)))


def _round(
    builder: ir.IRBuilder,
    load: _Load,
    vectors: ir.Value,
    factor: ir.Value,
    store: Callable[[ir.Value, ir.Value], None],
) -> ir.Value:
    """
    Store the nearest integers of the numbers times a factor; return their total.

    It is the sum of the rounded numbers, not of the exact ones: errors then count by weights, not by codes.
    """

    def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        nearest = vec.nearest_integers(builder, load(index), factor)
        store(index, nearest)
        return [builder.add(carried[0], nearest)]

    [sums] = vec.loop(builder, vectors, [vec.ints(0)], step)
    return _total(builder, sums)


def _total(builder: ir.IRBuilder, integers: ir.Value) -> ir.Value:
    return builder.sitofp(vec.call(builder, "llvm.vector.reduce.add.v16i32", INT32, integers), FLOAT)


def _digits(builder: ir.IRBuilder, integers: ir.Value, bits: int) -> ir.Value:
    """The two digits of sixteen integers as 32 bytes, in the order of the codes."""
    upper = builder.ashr(builder.add(integers, vec.ints(128)), vec.ints(8))
    lower = builder.sub(integers, builder.shl(upper, vec.ints(8)))
    first, second = (builder.trunc(each, ir.VectorType(INT8, LANES)) for each in (upper, lower))
    quads = order_of_quads(bits, LANES)
    order = [digit * LANES + column for quad in quads for digit in (0, 1) for column in quad]
    return vec.shuffle(builder, first, second, order)
