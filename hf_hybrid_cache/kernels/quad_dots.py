"""
Dot products of four 8-bit numbers, one way for each kind of processor.

`dot(builder, a, b, c)` is c plus the four products in each 32-bit lane, of unsigned numbers in a and signed ones in b.
Two of these products must stay within 16 bits.
"""

from typing import Any

from llvmlite import ir

from . import vector_ir as vec
from .pair_dots import PairDot, in_halves, of_avx2, of_avx512, of_processor
from .vector_ir import INT8, INT16, INT32, INTS, LANES

QuadDot = PairDot


def quad_dot(context: Any) -> QuadDot | None:
    """That of the processor for which code is compiled; `None` if it has none."""
    return of_processor(context, _OF_PROCESSORS)


def _of_avx512_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpbusd $3, $2, $0", "=v,0,v,v", [c, a, b], False)


def _of_avx_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", INT32, c, a, b)


# Without VNNI two products are added up in 16 bits, and two of these sums in 32.
_ONES = 0x10001


def _of_avx512(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    operands = (builder.bitcast(each, ir.VectorType(INT8, 4 * LANES)) for each in (a, b))
    sums = vec.call(builder, "llvm.x86.avx512.pmaddubs.w.512", ir.VectorType(INT16, 2 * LANES), *operands)
    return of_avx512(builder, builder.bitcast(sums, INTS), vec.ints(_ONES), c)


def _of_avx2(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    sums = in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", INT8, a, b, given=INT16)
    return of_avx2(builder, sums, vec.ints(_ONES), c)


_OF_PROCESSORS: dict[tuple[str, ...], QuadDot] = {
    ("avx512f", "avx512vnni"): _of_avx512_vnni,
    ("avxvnni",): _of_avx_vnni,
    ("avx512f", "avx512bw"): _of_avx512,
    ("avx2",): _of_avx2,
}
