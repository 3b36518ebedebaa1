"""
Dot products of four 8-bit numbers, one way for each kind of processor.

`dot(builder, a, b, c)` is c plus the four products in each 32-bit lane, of unsigned numbers in a and signed ones in b.
Two of these products must stay within 16 bits.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import vector_ir as vec
from .pair_dots import PairDot, in_halves, pair_dot
from .tiles import has_feature
from .vector_ir import INT8, INT16, INT32, INTS, LANES

QuadDot = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


def quad_dot(context: Any) -> QuadDot | None:
    """That of the processor for which code is compiled; `None` if it has none."""
    pair = pair_dot(context)
    if has_feature(context, "avx512f") and has_feature(context, "avx512vnni"):
        return _of_avx512_vnni
    if has_feature(context, "avxvnni"):
        return _of_avx_vnni
    return pair and _of_pairs(pair, has_feature(context, "avx512bw"))


def _of_avx512_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpbusd $3, $2, $0", "=v,0,v,v", [c, a, b], False)


def _of_avx_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", INT32, c, a, b)


def _of_pairs(pair: PairDot, is_wide: bool) -> QuadDot:
    """Two products of 8 bits are added up in 16 bits, and two of these sums in 32."""

    def dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        if is_wide:
            bytes_of = ir.VectorType(INT8, 4 * LANES)
            operands = (builder.bitcast(each, bytes_of) for each in (a, b))
            sums = vec.call(builder, "llvm.x86.avx512.pmaddubs.w.512", ir.VectorType(INT16, 2 * LANES), *operands)
            sums = builder.bitcast(sums, INTS)
        else:
            sums = in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", INT8, a, b, given=INT16)
        return pair(builder, sums, vec.ints(0x10001), c)

    return dot
