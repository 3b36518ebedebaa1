"""
Dot products of pairs of 16-bit numbers, one way for each kind of processor.

`dot(builder, a, b, c)` is c plus the products of both pairs in each 32-bit lane. Sums must stay within 32 bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vector_ir as vec
from .vector_ir import INT16, INT32, INTS, LANES

PairDot = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
Dot = TypeVar("Dot")


def pair_dot(context: Any) -> PairDot | None:
    """That of the processor for which code is compiled; `None` if it has none."""
    return of_processor(context, _OF_PROCESSORS)


def of_processor(context: Any, dots: dict[tuple[str, ...], Dot]) -> Dot | None:
    """The first whose features the processor has."""
    for features, dot in dots.items():
        if all(vec.has_feature(context, feature) for feature in features):
            return dot
    return None


@intrinsic
def has_pair_dot(typing_context: Any) -> Any:
    """Whether the processor has one, a constant."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return ir.IntType(1)(int(pair_dot(context) is not None))

    return types.boolean(), generate


def plain_dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """For any processor."""
    for shift in (False, True):
        x, y = (builder.ashr(each if shift else builder.shl(each, vec.ints(16)), vec.ints(16)) for each in (a, b))
        c = builder.add(c, builder.mul(x, y))
    return c


def _of_avx512_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    # Of the intrinsic, LLVM makes two instructions where it takes the latency for a problem, which here it is not.
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
    ("avx512f", "avx512vnni"): _of_avx512_vnni,
    ("avxvnni",): _of_avx_vnni,
    ("avx512f", "avx512bw"): of_avx512,
    ("avx2",): of_avx2,
}


def in_halves(builder: ir.IRBuilder, intrinsic: str, kind: ir.Type, *vectors: ir.Value, given: ir.Type = INT32) -> Any:
    """An intrinsic of eight lanes of 32 bits, which takes them as numbers of one kind and gives those of another."""
    half = LANES // 2
    taken_type, given_type = (ir.VectorType(each, half * INT32.width // each.width) for each in (kind, given))
    results = []
    for part in (range(half), range(half, LANES)):
        pieces = (builder.bitcast(vec.shuffle(builder, each, each, part), taken_type) for each in vectors)
        result = vec.call(builder, intrinsic, given_type, *pieces)
        results.append(builder.bitcast(result, ir.VectorType(INT32, half)))
    low, high = results
    return vec.shuffle(builder, low, high, range(LANES))
