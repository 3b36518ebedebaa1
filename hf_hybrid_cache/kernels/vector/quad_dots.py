"""
Dot products of four 8-bit numbers, one way for each kind of processor.

`dot(builder, pairs, c)` adds to c, for each pair (a, b), the four products in each 32-bit lane. Numbers in a are
unsigned, numbers in b signed. The sum of the two products in half a lane, over all pairs, must stay within 16 bits.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir

from . import vector_ir as vec
from .pair_dots import in_halves, of_avx2, of_avx512, of_processor
from .processor import AVX2, AVX512, AVX512_VNNI, AVX_VNNI
from .tiles import reduced
from .vector_ir import INT8, INT16, INT32, INTS, LANES

QuadDot = Callable[[ir.IRBuilder, Sequence[tuple[ir.Value, ir.Value]], ir.Value], ir.Value]


def quad_dot() -> QuadDot | None:
    """The dot product of fours that the processor has; `None` if it has none."""
    return of_processor(_OF_PROCESSORS)


def _of_avx512_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(INTS, [INTS] * 3)
    for a, b in pairs:
        c = builder.asm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", [c, a, b], False)
    return c


def _of_avx_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    for a, b in pairs:
        c = in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", INT32, c, a, b)
    return c


# Without VNNI, two products are added in 16 bits, and two of these sums in 32 bits.
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
    """The sum of all pairs' products in halves of lanes, as lanes of 32 bits."""
    products = [builder.bitcast(multiply(a, b), _HALVES) for a, b in pairs]
    return builder.bitcast(reduced(builder, products, ir.IRBuilder.add), INTS)


_OF_PROCESSORS: dict[tuple[str, ...], QuadDot] = {
    AVX512_VNNI: _of_avx512_vnni,
    AVX_VNNI: _of_avx_vnni,
    AVX512: _of_avx512,
    AVX2: _of_avx2,
}
