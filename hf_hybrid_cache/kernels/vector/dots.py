"""
Dot products of a few small numbers in each 32-bit lane, one way for each kind of processor.

- Pairs of 16-bit integers: `dot(builder, a, b, c)` is c plus the products of both pairs.
- Fours of 8-bit integers: `dot(builder, pairs, c)` adds to c, for each pair (a, b), the four products. Numbers in a are
  unsigned, numbers in b signed. The sum of the two products in half a lane, over all pairs, must stay within 16 bits.
- Pairs of bfloat16.

Sums of integers must stay within 32 bits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from llvmlite import ir

from . import vector_ir as vec
from .processor import AVX2, AVX512, AVX512_VNNI, AVX_VNNI, has_features
from .vector_ir import FLOATS, INT8, INT16, INT32, INT64, INTS, LANES

MultiplyAdd = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
MultiplyFours = Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]
QuadDot = Callable[[ir.IRBuilder, Sequence[tuple[ir.Value, ir.Value]], ir.Value], ir.Value]
Dot = TypeVar("Dot")

_HALVES = ir.VectorType(INT16, 2 * LANES)
_BYTES = ir.VectorType(INT8, 4 * LANES)


def pair_dot() -> MultiplyAdd | None:
    """The dot product of pairs that the processor has; `None` if it has none."""
    return _of_processor(_pairs_of_avx512_vnni, _pairs_of_avx_vnni, _pairs_of_avx512, _pairs_of_avx2)


def quad_dot() -> QuadDot | None:
    """The dot product of fours that the processor has; `None` if it has none."""
    return _of_processor(_quads_of_avx512_vnni, _quads_of_avx_vnni, _quads_of_avx512, _quads_of_avx2)


class QuadSums(NamedTuple):
    """
    Running sums of products of fours, of which one operand is the same four in all lanes.

    Attributes:
        lanes: of a vector: as many as a register has, because LLVM would keep each four for both halves of a wider
            vector, and registers are few.
        vectors: of codes in a tile, whose sums with six tokens stay in registers.
        zero: no products yet.
        add: adds the products of unsigned codes with the four signed numbers some bytes after an address.
        widened: the sums, in lanes of 32 bits.
    """

    lanes: int
    vectors: int
    zero: ir.Value
    add: Callable[[ir.IRBuilder, ir.Value, ir.Value, int, ir.Value], ir.Value]
    widened: Callable[[ir.IRBuilder, ir.Value], ir.Value] = lambda _, total: total


def quad_sums() -> QuadSums | None:
    """
    The sums of products of fours that the processor has; `None` if it has none.

    Without VNNI they are of 16 bits: of codes of 4 bits, and of at most eight fours.
    """
    makers = _sums_of_avx512_vnni, _sums_of_avx_vnni, _sums_of_avx512, _sums_of_avx2
    make = _of_processor(*makers)
    return None if make is None else make()


def _sums_of_avx512_vnni() -> QuadSums:
    return QuadSums(LANES, 2, vec.ints(0), dot_with_quad)


def _sums_of_avx_vnni() -> QuadSums:
    def add(builder: ir.IRBuilder, codes: ir.Value, address: ir.Value, offset: int, total: ir.Value) -> ir.Value:
        four = _four_at(builder, address, offset, LANES // 2)
        return vec.call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, total, codes, four)

    return QuadSums(LANES // 2, 1, vec.ints(0, LANES // 2), add)


def _sums_of_avx512() -> QuadSums:
    return _sums_of_halves(LANES, 2, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")


def _sums_of_avx2() -> QuadSums:
    return _sums_of_halves(LANES // 2, 1, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")


def _sums_of_halves(lanes: int, vectors: int, multiply: str, add_pairs: str) -> QuadSums:
    """Sums in 16 bits, given LLVM's names of the products of bytes and of pairs."""
    of_bytes, halves, words = (ir.VectorType(kind, lanes * 32 // kind.width) for kind in (INT8, INT16, INT32))

    def add(builder: ir.IRBuilder, codes: ir.Value, address: ir.Value, offset: int, total: ir.Value) -> ir.Value:
        operands = (builder.bitcast(each, of_bytes) for each in (codes, _four_at(builder, address, offset, lanes)))
        return builder.add(total, vec.call(builder, multiply, halves, *operands))

    def widened(builder: ir.IRBuilder, total: ir.Value) -> ir.Value:
        return vec.call(builder, add_pairs, words, total, ir.Constant(halves, [1] * halves.count))

    return QuadSums(lanes, vectors, ir.Constant(halves, [0] * halves.count), add, widened)


def _four_at(builder: ir.IRBuilder, address: ir.Value, offset: int, lanes: int) -> ir.Value:
    return vec.splat(builder, vec.load(builder, builder.add(address, INT64(offset)), INT32), lanes)


def _of_processor(*dots: Dot) -> Dot | None:
    """The first of the four `dots` whose features the processor has."""
    features = AVX512_VNNI, AVX_VNNI, AVX512, AVX2
    return next((dot for dot, needed in zip(dots, features, strict=True) if has_features(needed)), None)


def plain_dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The dot product of pairs for any processor."""
    for shift in (False, True):
        x, y = (builder.ashr(each if shift else builder.shl(each, vec.ints(16)), vec.ints(16)) for each in (a, b))
        c = builder.add(c, builder.mul(x, y))
    return c


def multiply_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """`total` plus the products of both pairs of bfloat16 in each lane, by AVX512-BF16."""
    dot = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.asm(dot, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, a, b], False)


def _pairs_of_avx512_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    # Assembly, because LLVM splits the intrinsic into two instructions for the sake of latency, which is hidden here.
    return builder.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpwssd $3, $2, $0", "=v,0,v,v", [c, a, b], False)


def _pairs_of_avx_vnni(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _in_halves(builder, "llvm.x86.avx512.vpdpwssd.256", INT32, INT32, c, a, b)


def _pairs_of_avx512(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    pairs = (builder.bitcast(each, _HALVES) for each in (a, b))
    return builder.add(c, vec.call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, *pairs))


def _pairs_of_avx2(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.add(c, _in_halves(builder, "llvm.x86.avx2.pmadd.wd", INT16, INT32, a, b))


def _quads_of_avx512_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    for a, b in pairs:
        c = builder.asm(ir.FunctionType(INTS, [INTS] * 3), "vpdpbusd $3, $2, $0", "=v,0,v,v", [c, a, b], False)
    return c


def dot_with_quad(builder: ir.IRBuilder, codes: ir.Value, address: ir.Value, offset: int, total: ir.Value) -> ir.Value:
    """`total` plus the products of four codes in each lane with a quad in memory, which needs no register: for VNNI."""
    kind = ir.FunctionType(INTS, [INTS, INTS, INT64])
    instruction = f"vpdpbusd {offset}($3){{1to16}}, $2, $0"
    return builder.asm(kind, instruction, "=v,0,v,r", [total, codes, address], False)


def _quads_of_avx_vnni(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    for a, b in pairs:
        c = _in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", INT32, INT32, c, a, b)
    return c


# Without VNNI, two products are added in 16 bits, and two of these sums in 32 bits.
_ONES = 0x10001


def _quads_of_avx512(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    return _pairs_of_avx512(builder, _added_up(builder, _quads_by_avx512, pairs), vec.ints(_ONES), c)


def _quads_of_avx2(builder: ir.IRBuilder, pairs: Sequence[tuple[ir.Value, ir.Value]], c: ir.Value) -> ir.Value:
    return _pairs_of_avx2(builder, _added_up(builder, _quads_by_avx2, pairs), vec.ints(_ONES), c)


def _quads_by_avx512(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    operands = (builder.bitcast(each, _BYTES) for each in (a, b))
    return vec.call(builder, "llvm.x86.avx512.pmaddubs.w.512", _HALVES, *operands)


def _quads_by_avx2(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.bitcast(_in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", INT8, INT16, a, b), _HALVES)


def _added_up(builder: ir.IRBuilder, multiply: MultiplyFours, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> ir.Value:
    """The sum of all pairs' products in halves of lanes, as lanes of 32 bits."""
    products = [multiply(builder, a, b) for a, b in pairs]
    return builder.bitcast(vec.reduced(builder, products, ir.IRBuilder.add), INTS)


def _in_halves(builder: ir.IRBuilder, intrinsic: str, taken: ir.Type, given: ir.Type, *vectors: ir.Value) -> ir.Value:
    """Call an intrinsic of eight 32-bit lanes on both halves: it takes numbers of type `taken` and gives `given`."""
    half, results = LANES // 2, []
    taken_type, given_type = (ir.VectorType(each, half * INT32.width // each.width) for each in (taken, given))
    for lanes in (range(half), range(half, LANES)):
        pieces = (builder.bitcast(vec.shuffle(builder, each, each, lanes), taken_type) for each in vectors)
        result = vec.call(builder, intrinsic, given_type, *pieces)
        results.append(builder.bitcast(result, ir.VectorType(INT32, half)))
    return vec.joined(builder, results)
