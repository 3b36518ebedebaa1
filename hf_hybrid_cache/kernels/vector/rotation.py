"""
Orthogonal rotation of keys and values before quantization (QuaRot, arXiv:2404.00456).

It spreads outlying channels over all channels. The Hadamard transform is its own inverse. A query that is rotated as
the keys gives the same scores; a sum of rotated values is rotated back once.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import jit_function
from .intrinsics import pointer
from .vector_ir import FLOAT, FLOATS, INT32, INT64, LANES

# Number of vectors that are rotated together in registers.
_LONGEST = 8
_BITS_OF_ONE = 0x3F800000


def rotation_size(dim: int) -> int:
    """The number of channels that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


@intrinsic
def rotate(typing_context: Any, numbers: Any, dim: Any, size: Any) -> Any:
    """
    Rotate runs of `size` of the first `dim` numbers, in place.

    numbers: address of float32, with zeros after `dim` up to a multiple of 16.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        numbers, dim, size = arguments
        # The root of the reciprocal, which comes from the exponent: processors may estimate the reciprocal of a root.
        exponent = builder.bitcast(builder.sitofp(size, FLOAT), INT32)
        reciprocal = builder.bitcast(builder.sub(INT32(2 * _BITS_OF_ONE), exponent), FLOAT)
        factor = vec.splat(builder, vec.call(builder, "llvm.sqrt.f32", FLOAT, reciprocal))

        def in_vector(vector: ir.Value, half: int) -> ir.Value:
            """Write the sum of two lanes that are `half` apart to the lower, and the difference to the upper one."""
            other = vec.shuffle(builder, vector, vector, [lane ^ half for lane in range(LANES)])
            signs = ir.Constant(FLOATS, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
            return vec.multiply_add(builder, vector, signs, other)

        def rotate_run(first: ir.Value, vectors: int) -> None:
            """Rotate a run of `vectors` vectors, or several runs in one vector, in registers."""
            places = [
                builder.add(numbers, builder.mul(builder.add(first, INT64(k)), INT64(LANES * 4)))
                for k in range(vectors)
            ]
            run = [vec.load(builder, place, FLOATS) for place in places]
            for half in (1, 2, 4, 8):
                turned = [in_vector(vector, half) for vector in run]
                is_inside = builder.icmp_signed("<", INT64(half), size)
                run = [builder.select(is_inside, new, old) for new, old in zip(turned, run, strict=True)]
            half = 1
            while half < vectors:
                for index in range(vectors):
                    if not index & half:
                        a, b = run[index], run[index + half]
                        run[index], run[index + half] = builder.fadd(a, b), builder.fsub(a, b)
                half *= 2
            for place, vector in zip(places, run, strict=True):
                # Multiply last: sums that overflow must become infinite.
                vec.store(builder, builder.fmul(vector, factor), place)

        def rotate_runs(vectors: int) -> None:
            def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                rotate_run(builder.mul(index, INT64(vectors)), vectors)
                return []

            filled = builder.add(dim, INT64(LANES * vectors - 1))
            vec.loop(builder, builder.sdiv(filled, INT64(LANES * vectors)), [], body)

        def rotate_halves(stage: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            """Rotate, in runs longer than the registers hold, vectors that are `_LONGEST << stage` apart."""
            shift = builder.add(stage, INT64(_LONGEST.bit_length() - 1))

            def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                before = builder.shl(builder.lshr(index, shift), builder.add(shift, INT64(1)))
                inside = builder.and_(index, builder.sub(builder.shl(INT64(1), shift), INT64(1)))
                first = builder.add(before, inside)
                both = first, builder.add(first, builder.shl(INT64(1), shift))
                places = [builder.add(numbers, builder.mul(vector, INT64(LANES * 4))) for vector in both]
                a, b = (vec.load(builder, place, FLOATS) for place in places)
                vec.store(builder, builder.fadd(a, b), places[0])
                vec.store(builder, builder.fsub(a, b), places[1])
                return []

            vec.loop(builder, builder.sdiv(dim, INT64(2 * LANES)), [], body)
            return []

        vectors = 1
        while vectors <= _LONGEST:
            is_first, is_last = vectors == 1, vectors == _LONGEST
            least, most = 0 if is_first else vectors * LANES, 2**62 if is_last else 2 * vectors * LANES
            is_wanted = builder.icmp_signed(">=", size, INT64(least))
            with builder.if_then(builder.and_(is_wanted, builder.icmp_signed("<", size, INT64(most)))):
                rotate_runs(vectors)
            vectors *= 2
        longer = builder.sdiv(size, INT64(_LONGEST * LANES))
        with builder.if_then(builder.icmp_signed(">", longer, INT64(1))):
            stages = vec.call(builder, "llvm.cttz.i64", INT64, longer, ir.IntType(1)(1))
            vec.loop(builder, stages, [], rotate_halves)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit_function
def rotate_back(numbers, dim, size, rotation_matrix, scratch):
    """
    Rotate a sum of values back in place, and multiply it by a matrix, in float32.

    numbers: float64; those from `dim` on are zero; rotation_matrix: address of float32 `[dim, dim]`, 0 for none;
    scratch: float32 `[2, numbers]`.
    """
    rotated = scratch[0]
    for column in range(numbers.size):
        rotated[column] = numbers[column]
    rotate(rotated.ctypes.data, dim, size)
    if rotation_matrix:
        mixed = scratch[1]
        for column in range(dim):
            mixed[column] = 0
        for row in range(dim):
            number = rotated[row]
            of_row = numba.carray(pointer(rotation_matrix + row * dim * 4, np.float32(0)), (dim,))
            for column in range(dim):
                mixed[column] += number * of_row[column]
        rotated = mixed
    for column in range(dim):
        numbers[column] = rotated[column]
