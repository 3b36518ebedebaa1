"""Hidden states of a token between two products: residuals, norms and rotary embedding, rounded as torch rounds."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.compiled import jit_function, jit_inlined
from ..vector.numbers_at import Numbers, array_at, as_number, floats_at, load_numbers, rounded_to_upper_half
from ..vector.vector_ir import INT64, LANES, load_vectors


@intrinsic
def add_up_squares(typing_context: Any, states: Any, added: Any, columns: Any, is_bfloat16: Any) -> Any:
    """
    Return the sum of the squares of states, once others are added to them.

    states: address of float32 or bfloat16 `[columns]`, written; added: address of the same, or 0; columns: a multiple
    of sixteen.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        states, added, columns, is_bfloat16 = arguments
        vectors = builder.sdiv(columns, INT64(LANES))

        def run(kind: Any) -> ir.Value:
            def at(start: ir.Value, index: ir.Value) -> ir.Value:
                return builder.add(start, builder.mul(index, INT64(LANES * vec.ITEM_BYTES[kind])))

            def add(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                [numbers], [others] = (
                    load_vectors(context, builder, kind, at(each, index), 1) for each in (states, added)
                )
                vec.store_as(builder, builder.fadd(numbers, others), kind, at(states, index))
                return carried

            def square(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                [numbers] = load_vectors(context, builder, kind, at(states, index), 1)
                return [vec.multiply_add(builder, numbers, numbers, carried[0])]

            with builder.if_then(builder.icmp_signed("!=", added, INT64(0))):
                vec.loop(builder, vectors, [], add)
            [sums] = vec.loop(builder, vectors, [vec.floats(0.0)], square)
            return vec.total(builder, sums)

        return vec.of_either_type(builder, is_bfloat16, run)

    return types.float32(*[types.int64] * 3, types.boolean), generate


@intrinsic
def scale_states(
    typing_context: Any, states: Any, factor: Any, weight: Any, columns: Any, is_bfloat16: Any, out: Any
) -> Any:
    """
    Write `states * factor * weight`; of bfloat16 each product is rounded.

    states, weight, out: addresses of float32 or bfloat16 `[columns]`, a multiple of sixteen; factor: float32.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        states, factor, weight, columns, is_bfloat16, out = arguments
        factors = vec.splat(builder, factor)

        def run(kind: Any) -> None:
            def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                offset = builder.mul(index, INT64(LANES * vec.ITEM_BYTES[kind]))
                [numbers], [weights] = (
                    load_vectors(context, builder, kind, builder.add(start, offset), 1) for start in (states, weight)
                )
                scaled = vec.rounded_to(builder, builder.fmul(numbers, factors), kind)
                vec.store_as(builder, builder.fmul(scaled, weights), kind, builder.add(out, offset))
                return carried

            vec.loop(builder, builder.sdiv(columns, INT64(LANES)), [], step)

        vec.of_either_type(builder, is_bfloat16, run)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, *[types.int64] * 2, types.boolean, types.int64), generate


@jit_inlined
def normalize(states, added, weight, epsilon, columns, is_bfloat16, out):
    """Write the root mean square norm of states, once others are added to them, times a weight."""
    mean = add_up_squares(states, added, columns, is_bfloat16) / np.float32(columns)
    # Of a root's reciprocal LLVM makes an estimate, which is NaN where squares overflow and torch has zero.
    factor = np.sqrt(np.float32(1) / (mean + np.float32(epsilon)))
    scale_states(states, factor, weight, columns, is_bfloat16, out)


@jit_function
def embed_position(head, cosines, sines, dim, is_bfloat16):
    """Rotate the pairs `(i, i + dim / 2)` of a head by the angles of its position; all are `[dim]` at addresses."""
    numbers, half = np.empty((3, dim), np.float32), dim // 2
    for row, start in enumerate((head, cosines, sines)):
        load_numbers(Numbers(start, is_bfloat16), 0, dim, numbers[row])
    if is_bfloat16:
        turned = array_at(head, dim, np.uint16(0))
        for index in range(dim):
            other = -numbers[0, index + half] if index < half else numbers[0, index - half]
            parts = _rounded(numbers[0, index] * numbers[1, index]) + _rounded(other * numbers[2, index])
            turned[index] = rounded_to_upper_half(np.float32(parts).view(np.uint32))
    else:
        plain = floats_at(head, dim)
        for index in range(dim):
            other = -numbers[0, index + half] if index < half else numbers[0, index - half]
            plain[index] = numbers[0, index] * numbers[1, index] + other * numbers[2, index]


@jit_inlined
def _rounded(number):
    """A float32 rounded to bfloat16; infinity and NaN, which no rounding changes here, have no lower bits."""
    return as_number(rounded_to_upper_half(np.float32(number).view(np.uint32)) << np.uint32(16))


@jit_inlined
def scatter(states, dim, out, stride, item):
    """Write numbers of `item` bytes `stride` bytes apart, as those of a key are in its block."""
    if item == 2:
        for index in range(dim):
            array_at(out + index * stride, 1, np.uint16(0))[0] = array_at(states, dim, np.uint16(0))[index]
    else:
        for index in range(dim):
            floats_at(out + index * stride, 1)[0] = floats_at(states, dim)[index]
