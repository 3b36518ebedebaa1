"""Products of weights of few bits with many tokens: what a call of the kernel is given, and where it is used."""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiled import jit
from .gemm_tiles import GEMM_PANELS, GEMM_TOKENS
from .integer_kernels import uses_integer_kernels
from .panel_gemm import TILE_BYTES, TILE_NUMBERS, multiply_tokens
from .panel_tiles import CHUNK
from .panels import PanelLayout
from .parallel import team_of_kernels
from .prefill import has_amx
from .token_rounding import has_quads

# Tokens that a thread multiplies with all of its panels, before it goes on to the next.
_BLOCK_BYTES = 2**19
_PARTS_OF_THREAD = 4


@intrinsic
def _has_quads(typing_context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return ir.IntType(1)(int(has_quads(context)))

    return types.boolean(), generate


@jit
def _processor_has_quads() -> bool:
    return _has_quads()  # type: ignore[call-arg]


@cache
def has_gemm() -> bool:
    """Whether the processor has the instructions."""
    return bool(_processor_has_quads())


def uses_gemm(is_bfloat16: bool) -> bool:
    """Whether many tokens are multiplied with codes as integers. With AMX torch multiplies bfloat16 faster."""
    return uses_integer_kernels() and has_gemm() and not (is_bfloat16 and has_amx())


def multiply_many(
    panels: int,
    layout: PanelLayout,
    factor: float,
    tokens: int,
    num_tokens: int,
    is_bfloat16: bool,
    bias: int,
    out: int,
) -> None:
    """
    Write `tokens @ weight.T + bias`, with tokens rounded to 8 bits between the least and largest of 32 columns.

    Args:
        panels: address of the weight.
        layout: of it.
        factor: of it, see `factor_of`.
        tokens: address of contiguous `[num_tokens, layout.columns]`, float32 or bfloat16.
        num_tokens: at least 1.
        is_bfloat16: the type of tokens, bias and what is written.
        bias: address of `[layout.rows]`; 0 for none.
        out: address of contiguous `[num_tokens, layout.rows]`.
    """
    team = team_of_kernels()
    tiles, chunks = -(-num_tokens // GEMM_TOKENS), layout.groups * layout.group // CHUNK
    integers = np.empty(tiles * chunks * TILE_BYTES, np.int8)
    token_numbers = np.empty(tiles * chunks * TILE_NUMBERS, np.float32)
    pairs = -(-layout.panels // GEMM_PANELS)
    multiply_tokens(
        *team,
        panels,
        factor,
        layout.bits,
        layout.rows,
        layout.columns,
        chunks,
        (layout.group // CHUNK).bit_length() - 1,
        layout.panel_bytes,
        tokens,
        num_tokens,
        is_bfloat16,
        bias,
        out,
        integers.ctypes.data,
        token_numbers.ctypes.data,
        max(1, _BLOCK_BYTES // (chunks * TILE_BYTES)),
        min(pairs, _PARTS_OF_THREAD * team[2]),
    )
