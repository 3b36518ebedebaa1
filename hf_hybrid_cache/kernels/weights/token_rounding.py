"""
Rounding of tokens to 16-bit integers, relative to the largest number of each group of columns.

If the processor adds four products of 8-bit numbers in one instruction, an integer is two signed digits of 8 bits. Four
columns whose codes are bytes of one word have their upper digits side by side, then their lower digits.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.processor import has_gemm
from ..vector.tiles import load_vectors
from ..vector.vector_ir import FLOAT, INT8, INT16, INT32, INT64, INTS, LANES

# The largest integer of two signed digits.
_LARGEST = 127 * 256 + 127.0
INFINITE = 0x7F800000
# By the bits of a code: the columns whose codes are the bytes of a word, then those of the word shifted by a code.
QUADS = {8: ((0, 2, 1, 3),), 4: ((0, 4, 1, 5), (2, 6, 3, 7))}


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
        add, multiply, size_of_item = builder.add, builder.mul, {types.float32: 4, types.uint16: 2}
        vectors = builder.sdiv(columns, INT64(LANES))

        def loaded(kind: Any, index: ir.Value) -> ir.Value:
            place = add(numbers, multiply(index, INT64(LANES * size_of_item[kind])))
            return load_vectors(context, builder, kind, place, 1)[0]

        def run(kind: Any) -> None:
            def largest_size(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                # Compare bits: those of infinity and NaN are larger than those of any finite number.
                size = builder.and_(builder.bitcast(loaded(kind, index), INTS), vec.ints(0x7FFFFFFF))
                return [builder.select(builder.icmp_unsigned(">", size, carried[0]), size, carried[0])]

            (sizes,) = vec.loop(builder, vectors, [vec.ints(0)], largest_size)
            size = vec.call(builder, "llvm.vector.reduce.umax.v16i32", INT32, sizes)
            largest, is_finite = builder.bitcast(size, FLOAT), builder.icmp_unsigned("<", size, INT32(INFINITE))
            counts = builder.and_(is_finite, builder.fcmp_ordered(">", largest, FLOAT(vec.NEGLIGIBLE)))
            factor = builder.select(counts, builder.fdiv(FLOAT(_LARGEST), largest), FLOAT(0.0))
            factors = vec.splat(builder, factor)

            def rounded(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                nearest = vec.nearest_integers(builder, loaded(kind, index), factors)
                place = add(integers, multiply(index, INT64(LANES * 2)))
                if has_gemm():
                    for width in QUADS:
                        with builder.if_then(builder.icmp_signed("==", bits, INT64(width))):
                            vec.store(builder, _digits(builder, nearest, width), place)
                else:
                    vec.store(builder, builder.trunc(nearest, ir.VectorType(INT16, LANES)), place)
                return [add(carried[0], nearest)]

            (sums,) = vec.loop(builder, vectors, [vec.ints(0)], rounded)
            step = builder.fdiv(largest, FLOAT(_LARGEST))
            step = builder.select(is_finite, step, FLOAT(float("nan")))
            # The sum of the rounded numbers, not of the exact ones: errors then count by weights, not by codes.
            total = builder.sitofp(vec.call(builder, "llvm.vector.reduce.add.v16i32", INT32, sums), FLOAT)
            vec.store(builder, step, step_at)
            vec.store(builder, builder.fmul(step, total), total_at)

        with builder.if_else(is_bfloat16) as (then, otherwise):
            with then:
                run(types.uint16)
            with otherwise:
                run(types.float32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, *[types.int64] * 4), generate


def _digits(builder: ir.IRBuilder, integers: ir.Value, bits: int) -> ir.Value:
    """The two digits of sixteen integers as 32 bytes, in the order of the codes."""
    upper = builder.ashr(builder.add(integers, vec.ints(128)), vec.ints(8))
    lower = builder.sub(integers, builder.shl(upper, vec.ints(8)))
    first, second = (builder.trunc(each, ir.VectorType(INT8, LANES)) for each in (upper, lower))
    of_word = 32 // bits
    quads = [[first + column for column in quad] for first in range(0, LANES, of_word) for quad in QUADS[bits]]
    order = [digit * LANES + column for quad in quads for digit in (0, 1) for column in quad]
    return vec.shuffle(builder, first, second, order)
