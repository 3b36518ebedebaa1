"""Functions for compiled code that Numba lacks: pointers, prefetches, copies that convert or transpose, types."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import vector_ir as vec
from .processor import has_bfloat16_products
from .vector_ir import FLOAT, FLOATS, INT64, LANES


@intrinsic
def pointer(typing_context: Any, address: Any, element: Any) -> Any:
    """The address as a pointer to elements of the type of `element`."""
    kind = types.CPointer(element)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


@intrinsic
def nearest(typing_context: Any, number: Any) -> Any:
    """The nearest integer of a float32, as float32; of two, the even one. `np.rint` would call a function."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return vec.call(builder, "llvm.rint.f32", FLOAT, *arguments)

    return types.float32(types.float32), generate


@intrinsic(prefer_literal=True)
def prefetch_lines(typing_context: Any, address: Any, lines: Any) -> Any:
    """Prefetch a constant number of lines. LLVM would unroll a loop, which takes longer than the prefetch saves."""
    count = lines.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        vec.prefetch(builder, arguments[0], count * vec.CACHE_LINE)
        return context.get_dummy_value()

    return types.void(types.int64, lines), generate


@intrinsic
def widen(typing_context: Any, element: Any, source: Any, count: Any, target: Any) -> Any:
    """
    Write numbers of `element` as float32.

    source, target: addresses; count: of numbers, a positive multiple of sixteen.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _, source, count, target = arguments

        def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            place = builder.add(source, builder.mul(index, INT64(LANES * vec.ITEM_BYTES[element])))
            [numbers] = vec.load_vectors(context, builder, element, place, 1)
            vec.store(builder, numbers, builder.add(target, builder.mul(index, INT64(LANES * 4))))
            return []

        vec.loop(builder, builder.sdiv(count, INT64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 3), generate


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
            for line, k in zip(vec.transposed(builder, tile), lanes, strict=True):
                vec.store(builder, line, place(target, add(first_column, k), first_row, rows))

        def body(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            across = builder.sdiv(columns, INT64(LANES))
            row, column = builder.sdiv(index, across), builder.srem(index, across)
            transpose_tile(multiply(row, INT64(LANES)), multiply(column, INT64(LANES)))
            return []

        vec.loop(builder, builder.sdiv(multiply(rows, columns), INT64(LANES * LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _constant(tell: Callable[[Any], bool], said: str) -> Any:
    """An intrinsic that takes a number and gives a constant, `tell` of the number's type."""

    def constant(typing_context: Any, element: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            return ir.IntType(1)(int(tell(element)))

        return types.boolean(element), generate

    constant.__doc__ = said
    return intrinsic(constant)


is_float32 = _constant(lambda element: element == types.float32, "Whether elements are float32.")
is_packed = _constant(
    lambda element: element == types.uint16 and has_bfloat16_products(),
    "Whether blocks of such elements are packed in pairs.",
)


@intrinsic
def call_at(typing_context: Any, address: Any, call: Any) -> Any:
    """
    The call that is in memory at an address, int64 for each field of the class `call`, a `NamedTuple` of integers.

    The kernel of a call in memory takes its address alone: Numba needs ten times as long for a tuple of many numbers,
    and a call that is in memory can be used again with other numbers in it.
    """
    made = types.NamedUniTuple(types.int64, len(call.instance_class._fields), call.instance_class)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.load(builder.inttoptr(arguments[0], context.get_value_type(made).as_pointer()), align=8)

    return made(types.int64, call), generate


@intrinsic
def address_of_call(typing_context: Any, call: Any) -> Any:
    """The address of a copy of a call, for `call_at`, which is there until the function that makes it returns."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        place = cgutils.alloca_once(builder, ir.ArrayType(INT64, len(call.types)))
        for index, kind in enumerate(call.types):
            number = context.cast(builder, builder.extract_value(arguments[0], index), kind, types.int64)
            builder.store(number, builder.gep(place, [INT64(0), INT64(index)]))
        return builder.ptrtoint(place, INT64)

    return types.int64(call), generate
