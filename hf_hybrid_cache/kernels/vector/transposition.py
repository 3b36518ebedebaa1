"""Transposition of a matrix, sixteen by sixteen numbers in registers at a time."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .vector_ir import FLOATS, INT64, LANES


@intrinsic
def transpose(typing_context: Any, source: Any, rows: Any, columns: Any, target: Any) -> Any:
    """
    Write the transpose of a matrix.

    source: address of float32 `[rows, columns]`, both multiples of 16; target: of float32 `[columns, rows]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        source, rows, columns, target = arguments
        add, multiply = builder.add, builder.mul

        def place(start: ir.Value, row: ir.Value, column: ir.Value, width: ir.Value) -> ir.Value:
            return add(start, multiply(add(multiply(row, width), column), INT64(4)))

        def transpose_tile(first_row: ir.Value, first_column: ir.Value) -> None:
            lanes = [INT64(lane) for lane in range(LANES)]
            tile = [vec.load(builder, place(source, add(first_row, k), first_column, columns), FLOATS) for k in lanes]
            for line, k in zip(transposed(builder, tile), lanes, strict=True):
                vec.store(builder, line, place(target, add(first_column, k), first_row, rows))

        def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            across = builder.sdiv(columns, INT64(LANES))
            row, column = builder.sdiv(index, across), builder.srem(index, across)
            transpose_tile(multiply(row, INT64(LANES)), multiply(column, INT64(LANES)))
            return []

        vec.loop(builder, builder.sdiv(multiply(rows, columns), INT64(LANES * LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of sixteen vectors. First halves change places, then quarters, then eighths, then sixteenths."""
    for half in (8, 4, 2, 1):
        # `firsts` takes the left vector's lanes whose bit `half` is not set, `seconds` the right one's whose bit is
        # set.
        firsts = [lane if not lane & half else LANES + lane - half for lane in range(LANES)]
        seconds = [lane + half if not lane & half else LANES + lane for lane in range(LANES)]
        joined = list(rows)
        for index in range(LANES):
            if not index & half:
                pair = rows[index], rows[index + half]
                joined[index] = vec.shuffle(builder, *pair, firsts)
                joined[index + half] = vec.shuffle(builder, *pair, seconds)
        rows = joined
    return rows
