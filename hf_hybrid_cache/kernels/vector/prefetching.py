"""Prefetching memory into the second-level cache."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .vector_ir import INT64


@intrinsic(prefer_literal=True)
def prefetch_lines(typing_context: Any, address: Any, lines: Any) -> Any:
    """Prefetch a constant number of lines. LLVM would unroll a loop, which takes longer than the prefetch saves."""
    count = lines.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        vec.prefetch(builder, arguments[0], count * vec.CACHE_LINE)
        return context.get_dummy_value()

    return types.void(types.int64, lines), generate


@intrinsic
def prefetch_bytes(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Prefetch the whole cache lines of `num_bytes`, at least one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address, num_bytes = arguments

        def body(line: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            vec.prefetch(builder, builder.add(address, builder.mul(line, INT64(vec.CACHE_LINE))), 1)
            return []

        vec.loop(builder, builder.sdiv(num_bytes, INT64(vec.CACHE_LINE)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
