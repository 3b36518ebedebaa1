"""
Products of quantized weights with many tokens: `tokens @ weight.T`, by the processor's products of 8-bit integers.

Tokens are rounded once. Then each thread takes two panels at a time and multiplies them with a block of tokens, which
stays in the second-level cache. See `gemm_tiles`.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from ..vector.compiled import Needed, jit, jit_function, jit_inlined, taking_numbers
from ..vector.numbers_at import Numbers, address_of, load_numbers, store_numbers, store_sixteen
from ..vector.parallel import split_work
from ..vector.vector_ir import LANES
from .gemm_tiles import (
    GEMM_PANELS,
    GEMM_TOKENS,
    PANEL_NUMBERS,
    TOKEN_NUMBERS,
    multiply_tile,
    round_chunk,
    sum_panel,
)
from .panel_tiles import CHUNK

# Integers and numbers of a tile's tokens in one chunk.
TILE_BYTES, TILE_NUMBERS = GEMM_TOKENS * CHUNK, GEMM_TOKENS * TOKEN_NUMBERS


class Gemm(NamedTuple):
    """One call of `multiply_tokens`."""

    panels: int  # address of the weight
    factor: float  # of the weight
    bits: int
    rows: int
    columns: int
    chunks: int  # number of chunks in a row
    group_shift: int  # binary logarithm of the chunks that share a scale
    panel_bytes: int
    tokens: Numbers  # [num_tokens, columns]
    num_tokens: int
    bias: Numbers  # [rows]; at 0 for none
    out: Numbers  # [num_tokens, rows]
    integers: int  # address of int8 [tiles, chunks, GEMM_TOKENS, CHUNK]
    token_numbers: int  # address of float32 [tiles, chunks, TOKEN_NUMBERS, GEMM_TOKENS]
    tiles_of_block: int
    parts: int


@jit
def multiply_tokens(
    team, panels, factor, bits, rows, columns, chunks, group_shift, panel_bytes,
    tokens, num_tokens, is_bfloat16, bias, out, integers, token_numbers, tiles_of_block, parts,
):  # fmt: skip
    call = Gemm(
        panels=panels,
        factor=factor,
        bits=bits,
        rows=rows,
        columns=columns,
        chunks=chunks,
        group_shift=group_shift,
        panel_bytes=panel_bytes,
        tokens=Numbers(tokens, is_bfloat16),
        num_tokens=num_tokens,
        bias=Numbers(bias, is_bfloat16),
        out=Numbers(out, is_bfloat16),
        integers=integers,
        token_numbers=token_numbers,
        tiles_of_block=tiles_of_block,
        parts=parts,
    )
    tiles = (num_tokens + GEMM_TOKENS - 1) // GEMM_TOKENS
    split_work(team, tiles, _round_tile, call)
    split_work(team, parts, _multiply_part, call)


@jit_function
def _round_tile(tile, call):
    """Round the tokens of a tile; the last token fills up the last tile."""
    filled = np.zeros(CHUNK, np.float32)
    for index in range(GEMM_TOKENS):
        token = min(tile * GEMM_TOKENS + index, call.num_tokens - 1)
        for chunk in range(call.chunks):
            first = token * call.columns + chunk * CHUNK
            address, is_bfloat16 = address_of(call.tokens, first), call.tokens.is_bfloat16
            count = call.columns - chunk * CHUNK
            if count < CHUNK:
                # Zeros meet the codes that pad a chunk, and the chunks that pad a group.
                filled[:] = 0
                if count > 0:
                    load_numbers(call.tokens, first, count, filled)
                address, is_bfloat16 = filled.ctypes.data, False
            place = tile * call.chunks + chunk
            round_chunk(
                call.bits,
                address,
                is_bfloat16,
                call.integers + place * TILE_BYTES + index * CHUNK,
                call.token_numbers + (place * TILE_NUMBERS + index) * 4,
            )


@jit_function
def _multiply_part(part, call):
    """Write the outputs of a part of the panels for all tokens."""
    numbers = np.empty((call.chunks, GEMM_PANELS, PANEL_NUMBERS, LANES), np.float32)
    outputs = np.empty((GEMM_TOKENS, GEMM_PANELS, LANES), np.float32)
    bias = np.zeros((GEMM_PANELS, LANES), np.float32)
    tiles = (call.num_tokens + GEMM_TOKENS - 1) // GEMM_TOKENS
    panels = (call.rows + LANES - 1) // LANES
    pairs = (panels + GEMM_PANELS - 1) // GEMM_PANELS
    for block in range(0, tiles, call.tiles_of_block):
        for pair in range(part * pairs // call.parts, (part + 1) * pairs // call.parts):
            first = pair * GEMM_PANELS
            # If the number of panels is odd, the last pair is the last panel twice.
            addresses = (
                call.panels + first * call.panel_bytes,
                call.panels + min(first + 1, panels - 1) * call.panel_bytes,
            )
            for which in range(GEMM_PANELS):
                row = (first + which) * LANES
                if call.bias.address and row < call.rows:
                    load_numbers(call.bias, row, min(LANES, call.rows - row), bias[which])
                at = numbers[0, which].ctypes.data
                sum_panel(call.bits, addresses[which], call.chunks, call.group_shift, at)
            for tile in range(block, min(tiles, block + call.tiles_of_block)):
                multiply_tile(
                    call.bits,
                    addresses[0],
                    addresses[1],
                    numbers.ctypes.data,
                    call.chunks,
                    call.group_shift,
                    call.integers + tile * call.chunks * TILE_BYTES,
                    call.token_numbers + tile * call.chunks * TILE_NUMBERS * 4,
                    outputs.ctypes.data,
                )
                for index in range(min(GEMM_TOKENS, call.num_tokens - tile * GEMM_TOKENS)):
                    for which in range(GEMM_PANELS):
                        row = (first + which) * LANES
                        if row < call.rows:
                            _store(call, outputs[index, which], bias[which], tile * GEMM_TOKENS + index, row)


@jit_inlined
def _store(call, output, bias, token, row):
    """Write up to sixteen outputs of a token."""
    target, rows = token * call.rows + row, min(LANES, call.rows - row)
    if rows == LANES:
        at = address_of(call.out, target)
        store_sixteen(output.ctypes.data, call.factor, bias.ctypes.data, call.out.is_bfloat16, at)
    else:
        store_sixteen(output.ctypes.data, call.factor, bias.ctypes.data, False, output.ctypes.data)
        store_numbers(output, call.out, target, rows)


def gemm_kernels() -> list[Needed]:
    """The kernel that multiplies many tokens with quantized weights."""
    return [(multiply_tokens, taking_numbers(multiply_tokens, factor=types.float64))]
