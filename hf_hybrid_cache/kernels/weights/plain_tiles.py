"""Products of a row of a weight in full precision, or of some of its columns, with a few tokens."""

from collections.abc import Callable
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
# If columns come before rows: columns that are multiplied together, so that sums are read and written once for all.
COLUMNS_AT_ONCE = 4
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

        _run_as_asked(builder, is_bfloat16, tokens, run)
        return context.get_dummy_value()

    return types.void(types.boolean, *[types.int64] * 6), generate


@intrinsic
def add_columns(
    typing_context: Any,
    is_bfloat16: Any,
    tokens: Any,
    columns: Any,
    column_bytes: Any,
    steps: Any,
    operand: Any,
    operand_stride: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """
    Add the products of `COLUMNS_AT_ONCE` columns with the inputs of a few tokens to the sums of these tokens.

    is_bfloat16: whether columns are bfloat16, not float32; tokens: number of tokens, one of `ROW_TOKENS`; columns:
    address of the first output of the first column, `column_bytes` before that of the next; steps: of `STEP` outputs,
    at least one; operand: address of float32 `[COLUMNS_AT_ONCE]` of the first token, `operand_stride` bytes before that
    of the next; sums: address of float32 `[steps * STEP]` of the first token, `sum_stride` bytes before that of the
    next.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        is_bfloat16, tokens, columns, column_bytes, steps, operand, operand_stride, sums, sum_stride = arguments
        add, multiply = builder.add, builder.mul
        starts = [add(columns, multiply(INT64(column), column_bytes)) for column in range(COLUMNS_AT_ONCE)]
        following = multiply(INT64(COLUMNS_AT_ONCE), column_bytes)

        def run(kind: Any, count: int) -> None:
            half_bytes = LANES * (2 if kind == types.uint16 else 4)
            inputs = []
            for token in range(count):
                of_token = add(operand, multiply(INT64(token), operand_stride))
                numbers = [
                    vec.load(builder, add(of_token, INT64(4 * column)), FLOAT) for column in range(COLUMNS_AT_ONCE)
                ]
                inputs.append([vec.splat(builder, number) for number in numbers])

            def add_step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                offset = multiply(index, INT64(2 * half_bytes))
                addresses = [add(start, offset) for start in starts]
                for address in addresses:
                    vec.prefetch(builder, add(address, following), 2 * half_bytes)
                for half in range(2):
                    # One vector at a time, which `load_vectors` keeps in order.
                    weights = [
                        load_vectors(context, builder, kind, add(address, INT64(half * half_bytes)), 1)[0]
                        for address in addresses
                    ]
                    for token, numbers in enumerate(inputs):
                        place = add(multiply(index, INT64(STEP * 4)), INT64(half * LANES * 4))
                        place = add(add(sums, multiply(INT64(token), sum_stride)), place)
                        total = vec.load(builder, place, FLOATS)
                        for weight, number in zip(weights, numbers, strict=True):
                            total = vec.multiply_add(builder, weight, number, total)
                        vec.store(builder, total, place)
                return []

            vec.loop(builder, steps, [], add_step)

        _run_as_asked(builder, is_bfloat16, tokens, run)
        return context.get_dummy_value()

    return types.void(types.boolean, *[types.int64] * 8), generate


def _run_as_asked(
    builder: ir.IRBuilder, is_bfloat16: ir.Value, tokens: ir.Value, run: Callable[[Any, int], None]
) -> None:
    """Generate code by `run(kind, count)` for each type of a weight and each of `ROW_TOKENS`; one runs."""
    for count in ROW_TOKENS:
        is_count = builder.icmp_signed("==", tokens, INT64(count))
        for kind, is_kind in ((types.uint16, is_bfloat16), (types.float32, builder.not_(is_bfloat16))):
            with builder.if_then(builder.and_(is_count, is_kind)):
                run(kind, count)
