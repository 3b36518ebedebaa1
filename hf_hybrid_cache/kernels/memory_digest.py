"""
A digest of memory, as fast as it is read.

Each piece of memory has lanes of 64 bits, which take turns at its words. A step of a lane is `rotate((lane ^ word) *
odd)`, a bijection of the lane for any word, and of the word for any lane: a single word that differs always shows. The
digest is no protection from somebody who wants two memories to have the same one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import vector_ir as vec
from .vector.compiled import jit, jit_function
from .vector.numbers_at import keep
from .vector.parallel import split_work, team_of_kernels
from .vector.tiles import pointer
from .vector.vector_ir import INT64

# Bytes that one thread reads at a time; digests of pieces follow each other.
PIECE_BYTES = 2**20
# Four vectors of eight lanes hide how long a multiplication takes.
_VECTORS, _WORDS = 4, ir.VectorType(INT64, 8)
_LANES = _VECTORS * 8
STEP_BYTES = _LANES * 8
_ODD, _ROTATION = 0x9E3779B97F4A7C15, 29


class _Pieces(NamedTuple):
    """One call of the kernel."""

    table: int  # int64 [pieces, 2], address and number of bytes
    out: int  # uint64 [pieces, lanes]


def digest_memories(memories: Sequence[tuple[int, int]]) -> list[bytes]:
    """
    Return 256 bytes for each MiB of each memory; the last one may be shorter and is filled up with zeros.

    The digest of a memory is that of its first MiBs followed by that of the others. It does not tell the size.

    Args:
        memories: addresses and numbers of bytes.
    """
    counts = [-(-num_bytes // PIECE_BYTES) for _, num_bytes in memories]
    pieces = [
        (address + first, min(PIECE_BYTES, num_bytes - first))
        for address, num_bytes in memories
        for first in range(0, num_bytes, PIECE_BYTES)
    ]
    out = np.empty((len(pieces), _LANES), np.uint64)
    if pieces:
        # One call for all: where processors are busy each call waits for the last thread.
        table = np.array(pieces, np.int64)
        _digest(*team_of_kernels(), len(pieces), table.ctypes.data, out.ctypes.data)
    parts = np.split(out.astype("<u8", copy=False), list(accumulate(counts))[:-1])
    return [part.tobytes() for part in parts[: len(memories)]]


@intrinsic
def _mix(typing_context: Any, address: Any, steps: Any, lanes: Any) -> Any:
    """Mix `steps` times all lanes with the words from `address` on, at least once; `lanes` is their address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address, steps, lanes = arguments

        def places(start: ir.Value) -> list[ir.Value]:
            offsets = (INT64(index * 64) for index in range(_VECTORS))
            return [builder.inttoptr(builder.add(start, offset), _WORDS.as_pointer()) for offset in offsets]

        odd, rotation = (ir.Constant(_WORDS, [number] * 8) for number in (_ODD, _ROTATION))

        def body(index: ir.Value, mixed: list[ir.Value]) -> list[ir.Value]:
            here = places(builder.add(address, builder.mul(index, INT64(STEP_BYTES))))
            results = []
            for lane, place in zip(mixed, here, strict=True):
                product = builder.mul(builder.xor(lane, builder.load(place, align=1)), odd)
                results.append(vec.call(builder, "llvm.fshl.v8i64", _WORDS, product, product, rotation))
            return results

        begun = [builder.load(place, align=8) for place in places(lanes)]
        for lane, place in zip(vec.loop(builder, steps, begun, body), places(lanes), strict=True):
            builder.store(lane, place, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit_function
def _digest_piece(piece, pieces):
    """Write the lanes of one piece."""
    row = numba.carray(pointer(pieces.table + piece * 16, np.int64(0)), 2)
    address, size = row[0], row[1]
    at = pieces.out + piece * STEP_BYTES
    lanes = numba.carray(pointer(at, np.uint64(0)), _LANES)
    for lane in range(_LANES):
        lanes[lane] = np.uint64(lane + 1) * np.uint64(_ODD)
    steps = size // STEP_BYTES
    if steps:
        _mix(address, steps, at)
    left = size - steps * STEP_BYTES
    if left:
        source = numba.carray(pointer(address + steps * STEP_BYTES, np.uint8(0)), left)
        filled = np.zeros(STEP_BYTES, np.uint8)
        filled[:left] = source
        _mix(filled.ctypes.data, 1, at)
        keep(filled)


@jit
def _digest(parallel, team, threads, num_pieces, table, out):
    split_work(parallel, team, threads, num_pieces, _digest_piece, _Pieces(table, out))
