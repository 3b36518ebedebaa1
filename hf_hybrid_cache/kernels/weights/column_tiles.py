"""Products of columns of a weight in full precision with a few tokens, added to the tokens' outputs."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..vector import vector_ir as vec
from ..vector.tiles import load_vectors
from ..vector.vector_ir import FLOAT, FLOATS, INT64, LANES
from .row_tiles import STEP, run_as_asked

# Columns that are multiplied together, so that sums are read and written once for all of them.
COLUMNS = 4


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
    Add the products of `COLUMNS` columns with the inputs of a few tokens to the sums of these tokens.

    is_bfloat16: whether columns are bfloat16, not float32; tokens: number of tokens, one of `ROW_TOKENS`; columns:
    address of the first output of the first column, `column_bytes` before that of the next; steps: of `STEP` outputs,
    at least one; operand: address of float32 `[COLUMNS]` of the first token, `operand_stride` bytes before that of the
    next; sums: address of float32 `[steps * STEP]` of the first token, `sum_stride` bytes before that of the next.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        is_bfloat16, tokens, columns, column_bytes, steps, operand, operand_stride, sums, sum_stride = arguments
        add, multiply = builder.add, builder.mul
        starts = [add(columns, multiply(INT64(column), column_bytes)) for column in range(COLUMNS)]
        following = multiply(INT64(COLUMNS), column_bytes)

        def run(kind: Any, count: int) -> None:
            half_bytes = LANES * (2 if kind == types.uint16 else 4)
            inputs = []
            for token in range(count):
                of_token = add(operand, multiply(INT64(token), operand_stride))
                numbers = [vec.load(builder, add(of_token, INT64(4 * column)), FLOAT) for column in range(COLUMNS)]
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

        run_as_asked(builder, is_bfloat16, tokens, run)
        return context.get_dummy_value()

    return types.void(types.boolean, *[types.int64] * 8), generate
