"""
Scores of bfloat16 keys for four query rows in bfloat16, by the processor's dot products of pairs.

A product of two bfloat16 is exact in float32, as in `tiles`; one instruction makes two products. The instruction takes
numbers smaller than 1.2e-38 for zero.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..blocks import BLOCK
from ..vector import vector_ir as vec
from ..vector.processor import has_bfloat16_products
from ..vector.tiles import ROWS
from ..vector.vector_ir import INT16, INT32, INT64, INTS, LANES
from .packed_tiles import multiply_pairs

_HALVES = 2 * LANES  # numbers of 16 bits in a vector
_VECTORS = BLOCK // _HALVES


@intrinsic
def score_pairs(
    typing_context: Any, element: Any, query: Any, stride: Any, keys: Any, head_dim: Any, scores: Any, ahead: Any
) -> Any:
    """
    Write `scores = query @ keys`, or nothing if keys are not bfloat16 or the processor lacks the instruction.

    query: address of bfloat16 rows, `stride` bytes apart, each `[head_dim]`, an even number; keys: address of one block
    of `element`, `[head_dim, BLOCK]`; scores: address of float32 `[ROWS, BLOCK]`; ahead: address to prefetch, row by
    row.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _, query, stride, keys, head_dim, scores, ahead = arguments
        if element != types.uint16 or not has_bfloat16_products():
            return context.get_dummy_value()
        add, multiply = builder.add, builder.mul

        def body(pair: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            offset = multiply(pair, INT64(2 * BLOCK * 2))
            rows = [_load_row(builder, add(keys, add(offset, INT64(row * BLOCK * 2)))) for row in range(2)]
            vec.prefetch(builder, add(ahead, offset), 2 * BLOCK * 2)
            loaded = [
                builder.bitcast(vec.shuffle(builder, even, odd, lanes), INTS)
                for even, odd in zip(*rows, strict=True)
                for lanes in (_IN_LOWER, _IN_UPPER)
            ]
            results = []
            for row in range(ROWS):
                position = add(query, add(multiply(INT64(row), stride), multiply(pair, INT64(4))))
                number = vec.splat(builder, vec.load(builder, position, INT32))
                of_row = sums[row * len(loaded) : (row + 1) * len(loaded)]
                results += [
                    multiply_pairs(builder, key, number, total) for key, total in zip(loaded, of_row, strict=True)
                ]
            return results

        count = builder.lshr(head_dim, INT64(1))
        sums = vec.loop(builder, count, [vec.floats(0.0)] * (ROWS * BLOCK // LANES), body)
        for index in range(0, len(sums), 2):
            for half, lanes in enumerate((_FIRST, _LAST)):
                place = add(scores, INT64((index + half) * LANES * 4))
                vec.store(builder, vec.shuffle(builder, sums[index], sums[index + 1], lanes), place)
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 6), generate


def _load_row(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """The bits of a row of keys."""
    kind = ir.VectorType(INT16, _HALVES)
    return [vec.load(builder, builder.add(address, INT64(vector * _HALVES * 2)), kind) for vector in range(_VECTORS)]


def _interleaved(first: int) -> list[int]:
    """Lanes that pair two vectors: of each eight lanes the four from `first` on, which is one instruction."""
    starts = [eight + first + index for eight in range(0, _HALVES, 8) for index in range(4)]
    return [start + vector * _HALVES for start in starts for vector in range(2)]


_IN_LOWER, _IN_UPPER = _interleaved(0), _interleaved(4)
# The lanes of 32 tokens' sums, in order, in the two vectors of sums that the interleaved keys give.
_PLACES = [four // 2 * 4 + four % 2 * LANES + lane for four in range(_HALVES // 4) for lane in range(4)]
_FIRST, _LAST = _PLACES[:LANES], _PLACES[LANES:]
