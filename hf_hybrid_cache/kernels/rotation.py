"""
Orthogonal rotation of keys and values, so that what is coded has no outlying channels (QuaRot, arXiv:2404.00456).

The Hadamard transform is its own inverse: a query that is rotated like the keys gives the same scores, and what is
summed up of rotated values is rotated back once.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .compiled import jit_part
from .vector_ir import FLOAT, FLOATS, INT64, LANES


def rotation_size(dim: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


@intrinsic
def rotate(typing_context: Any, numbers: Any, dim: Any, size: Any) -> Any:
    """
    Rotate runs of `size` of the first `dim` numbers, in place.

    numbers: address of float32, `dim` filled up to a multiple of 16; what fills it up is zero.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        numbers, dim, size = arguments
        add, multiply, minus = builder.add, builder.mul, vec.floats(-1.0)
        vectors = builder.sdiv(add(dim, INT64(LANES - 1)), INT64(LANES))
        root = vec.call(builder, "llvm.sqrt.f32", FLOAT, builder.sitofp(size, FLOAT))
        factor = vec.splat(builder, builder.fdiv(FLOAT(1.0), root))

        def place(vector: ir.Value) -> ir.Value:
            return add(numbers, multiply(vector, INT64(LANES * 4)))

        def rotate_vector(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            vector = builder.fmul(vec.load(builder, place(index), FLOATS), factor)
            for half in (1, 2, 4, 8):
                other = vec.shuffle(builder, vector, vector, [lane ^ half for lane in range(LANES)])
                signs = ir.Constant(FLOATS, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
                turned = vec.multiply_add(builder, vector, signs, other)
                vector = builder.select(builder.icmp_signed("<", INT64(half), size), turned, vector)
            vec.store(builder, vector, place(index))
            return []

        vec.loop(builder, vectors, [], rotate_vector)

        def rotate_pair(index: ir.Value, half: ir.Value) -> None:
            """Of all pairs of vectors that are `half` a run apart, the one with this index."""
            run = builder.sdiv(index, half)
            first = add(multiply(run, multiply(half, INT64(2))), builder.srem(index, half))
            places = place(first), place(add(first, half))
            a, b = (vec.load(builder, each, FLOATS) for each in places)
            vec.store(builder, builder.fadd(a, b), places[0])
            vec.store(builder, vec.multiply_add(builder, b, minus, a), places[1])

        def rotate_halves(stage: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            half = builder.shl(INT64(1), stage)

            def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                rotate_pair(index, half)
                return []

            vec.loop(builder, builder.sdiv(vectors, INT64(2)), [], body)
            return []

        longest = builder.sdiv(size, INT64(LANES))
        with builder.if_then(builder.icmp_signed(">", longest, INT64(1))):
            stages = vec.call(builder, "llvm.cttz.i64", INT64, longest, ir.IntType(1)(1))
            vec.loop(builder, stages, [], rotate_halves)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit_part
def rotate_back(numbers, dim, size, mixing):
    """Undo what was done to values: `rotate`, and then multiply by `mixing`, `[dim, dim]`, if it is not empty."""
    rotate(numbers.ctypes.data, dim, size)
    if mixing.size:
        mixed = np.zeros(dim, np.float32)
        for row in range(dim):
            number = numbers[row]
            for column in range(dim):
                mixed[column] += number * mixing[row, column]
        for column in range(dim):
            numbers[column] = mixed[column]


@jit_part
def rotate_columns(tile, dim, size):
    """Rotate each column of a tile likewise, whose first `dim` rows are what is rotated."""
    half = 1
    while half < size:
        for start in range(0, dim, 2 * half):
            for index in range(start, start + half):
                for lane in range(tile.shape[1]):
                    a, b = tile[index, lane], tile[index + half, lane]
                    tile[index, lane], tile[index + half, lane] = a + b, a - b
        half *= 2
    factor = np.float32(1 / np.sqrt(size))
    for index in range(dim):
        for lane in range(tile.shape[1]):
            tile[index, lane] *= factor
