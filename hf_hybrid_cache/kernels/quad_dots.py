"""
Dot products of four 8-bit numbers, one way for each kind of processor.

`dot(builder, pairs, c)` is c plus, for each pair (a, b), the four products in each 32-bit lane, of unsigned numbers in
a and signed ones in b. What half of a lane gets of all pairs together must stay within 16 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from . import vector_ir as vec
from .pair_dots import in_halves, of_avx2, of_avx512, of_processor
from .tiles import reduced
from .vector_ir import INT8, INT16, INT32, INTS, LANES

QuadDot = Callable[[ir.IRBuilder, Sequence[tuple[ir.Value, ir.Value]], ir.Value], ir.Value]


def quad_dot(context: Any) -> QuadDot | None:
    """That of the processor for which code is compiled; `None` if it has none."""
    return of_processor(context, _OF_PROCESSORS)


def _of_avx512_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(INTS, [INTS] * 3)
    for a, b in pairs:
        c = builder.asm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", [c, a, b], False)
    return c


def _of_avx_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    for a, b in pairs:
        c = in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", INT32, c, a, b)
    return c


# Without VNNI products are added up in 16 bits, and two of these sums in 32.
_ONES = 0x10001
_HALVES = ir.VectorType(INT16, 2 * LANES)


def _of_avx512(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    def multiply(a: ir.Value, b: ir.Value) -> ir.Value:
        operands = (builder.bitcast(each, ir.VectorType(INT8, 4 * LANES)) for each in (a, b))
        return vec.call(builder, "llvm.x86.avx512.pmaddubs.w.512", _HALVES, *operands)

    return of_avx512(builder, _added_up(builder, multiply, pairs), vec.ints(_ONES), c)


def _of_avx2(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    def multiply(a: ir.Value, b: ir.Value) -> ir.Value:
        return in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", INT8, a, b, given=INT16)

    return of_avx2(builder, _added_up(builder, multiply, pairs), vec.ints(_ONES), c)


def _added_up(
    builder: ir.IRBuilder, multiply: Callable[..., ir.Value], pairs: Sequence[tuple[ir.Value, ir.Value]]
) -> ir.Value:
    """The products of all pairs in halves of lanes, as lanes."""
    products = [builder.bitcast(multiply(a, b), _HALVES) for a, b in pairs]
    return builder.bitcast(reduced(builder, products, ir.IRBuilder.add), INTS)


_OF_PROCESSORS: dict[tuple[str, ...], QuadDot] = {
    ("avx512f", "avx512vnni"): _of_avx512_vnni,
    ("avxvnni",): _of_avx_vnni,
    ("avx512f", "avx512bw"): _of_avx512,
    ("avx2",): _of_avx2,
}
