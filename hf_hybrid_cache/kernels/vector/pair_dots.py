"""
Dot products of pairs of 16-bit numbers, one way for each kind of processor.

`dot(builder, a, b, c)` is c plus the products of both pairs in each 32-bit lane. Sums must stay within 32 bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir

from . import vector_ir as vec
from .processor import AVX2, AVX512, AVX512_VNNI, AVX_VNNI, has_features
from .vector_ir import INT16, INT32, INTS, LANES

PairDot = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
Dot = TypeVar("Dot")


def pair_dot() -> PairDot | None:
    """The dot product of pairs that the processor has; `None` if it has none."""
    return of_processor(_OF_PROCESSORS)


def of_processor(dots: dict[tuple[str, ...], Dot]) -> Dot | None:
    """The first of `dots`, by features, whose features the processor has."""
    return next((dot for features, dot in dots.items() if has_features(features)), None)


def plain_dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The dot product of pairs for any processor."""
    for shift in (False, True):
        x, y = (builder.ashr(each if shift else builder.shl(each, vec.ints(16)), vec.ints(16)) for each in (a, b))
        c = builder.add(c, builder.mul(x, y))
    return c


def _of_avx512_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    # Assembly, because LLVM splits the intrinsic into two instructions for the sake of latency, which is hidden here.
    kind = ir.FunctionType(INTS, [INTS] * 3)
    return builder.asm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v", [c, a, b], False)


def _of_avx_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return in_halves(builder, "llvm.x86.avx512.vpdpwssd.256", INT32, c, a, b)


def of_avx512(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    pairs = (builder.bitcast(each, ir.VectorType(INT16, 2 * LANES)) for each in (a, b))
    return builder.add(c, vec.call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, *pairs))


def of_avx2(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.add(c, in_halves(builder, "llvm.x86.avx2.pmadd.wd", INT16, a, b))


_OF_PROCESSORS: dict[tuple[str, ...], PairDot] = {
    AVX512_VNNI: _of_avx512_vnni,
    AVX_VNNI: _of_avx_vnni,
    AVX512: of_avx512,
    AVX2: of_avx2,
}


def in_halves(builder: ir.IRBuilder, intrinsic: str, kind: ir.Type, *vectors: ir.Value, given: ir.Type = INT32) -> Any:
    """Call an intrinsic of eight 32-bit lanes on both halves: it takes numbers of `kind` and gives those of `given`."""
    half = LANES // 2
    taken_type, given_type = (ir.VectorType(each, half * INT32.width // each.width) for each in (kind, given))
    results = []
    for part in (range(half), range(half, LANES)):
        pieces = (builder.bitcast(vec.shuffle(builder, each, each, part), taken_type) for each in vectors)
        result = vec.call(builder, intrinsic, given_type, *pieces)
        results.append(builder.bitcast(result, ir.VectorType(INT32, half)))
    low, high = results
    return vec.shuffle(builder, low, high, range(LANES))
