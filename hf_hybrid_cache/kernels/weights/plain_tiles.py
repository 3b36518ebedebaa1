"""Products of a row of a weight in full precision with a few tokens."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.vector_ir import FLOAT, FLOATS, INT64, LANES, load_vectors

# Columns that are multiplied together: a cache line of bfloat16.
STEP = 2 * LANES
# Numbers of tokens that share the loads of a row; their sums stay in registers.
ROW_TOKENS = (4, 2, 1)
# Bytes between the memory that is read and the memory that is prefetched.
_AHEAD = 4096


@intrinsic
def multiply_row(
    typing_context: Any,
    is_bfloat16: Any,
    tokens: Any,
    row: Any,
    steps: Any,
    operand: Any,
    operand_stride: Any,
    out: Any,
) -> Any:
    """
    Write the products of a row with a few tokens; sums are of float32.

    is_bfloat16: whether the row is bfloat16, not float32; tokens: number of tokens, one of `ROW_TOKENS`; row: address;
    steps: of `STEP` columns, at least one; operand: address of float32 rows, `operand_stride` bytes apart, one for each
    token; out: address of float32 `[tokens]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        is_bfloat16, tokens, row, steps, operand, operand_stride, out = arguments
        add, multiply = builder.add, builder.mul

        def run(kind: Any, count: int) -> None:
            step_bytes = STEP * (2 if kind == types.uint16 else 4)

            def add_step(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                address = add(row, multiply(index, INT64(step_bytes)))
                vec.prefetch(builder, add(address, INT64(_AHEAD)), step_bytes)
                # One vector at a time, which `load_vectors` keeps in order.
                halves = [
                    load_vectors(context, builder, kind, add(address, INT64(half * step_bytes // 2)), 1)[0]
                    for half in range(2)
                ]
                totals = list(totals)
                for token in range(count):
                    start = add(add(operand, multiply(INT64(token), operand_stride)), multiply(index, INT64(STEP * 4)))
                    for half, numbers in enumerate(halves):
                        inputs = vec.load(builder, add(start, INT64(half * LANES * 4)), FLOATS)
                        chain = 2 * token + half
                        totals[chain] = vec.multiply_add(builder, numbers, inputs, totals[chain])
                return totals

            totals = vec.loop(builder, steps, [vec.floats(0.0)] * (2 * count), add_step)
            for token in range(count):
                total = vec.total(builder, builder.fadd(totals[2 * token], totals[2 * token + 1]))
                builder.store(total, builder.inttoptr(add(out, INT64(4 * token)), FLOAT.as_pointer()))

        for count in ROW_TOKENS:
            is_count = builder.icmp_signed("==", tokens, INT64(count))
            for kind, is_kind in ((types.uint16, is_bfloat16), (types.float32, builder.not_(is_bfloat16))):
                with builder.if_then(builder.and_(is_count, is_kind)):
                    run(kind, count)
        return context.get_dummy_value()

    return types.void(types.boolean, *[types.int64] * 6), generate
