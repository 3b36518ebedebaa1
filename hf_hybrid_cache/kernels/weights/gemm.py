"""Products of quantized weights with many tokens: calls of the kernel, and whether it is used."""

import numpy as np

from ..integer_kernels import uses_integer_kernels
from ..vector.parallel import team_of_kernels
from ..vector.processor import has_amx, has_gemm
from .gemm_tiles import GEMM_PANELS, GEMM_TOKENS
from .panel_gemm import TILE_BYTES, TILE_NUMBERS, multiply_tokens
from .panel_tiles import CHUNK
from .panels import PanelLayout

# Bytes of a block of rounded tokens, which a thread multiplies with all of its panels before the next block.
_BLOCK_BYTES = 2**19
_PARTS_OF_THREAD = 4


def uses_gemm(is_bfloat16: bool) -> bool:
    """Whether many tokens are multiplied by this kernel. With AMX torch multiplies bfloat16 faster."""
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
        layout: of the weight.
        factor: of the weight, see `factor_of`.
        tokens: address of contiguous `[num_tokens, layout.columns]`, float32 or bfloat16.
        num_tokens: at least 1.
        is_bfloat16: whether tokens, bias and `out` are bfloat16, not float32.
        bias: address of `[layout.rows]`; 0 for none.
        out: address of contiguous `[num_tokens, layout.rows]`, written.
    """
    team = team_of_kernels()
    tiles, chunks = -(-num_tokens // GEMM_TOKENS), layout.groups * layout.group // CHUNK
    integers = np.empty(tiles * chunks * TILE_BYTES, np.int8)
    token_numbers = np.empty(tiles * chunks * TILE_NUMBERS, np.float32)
    pairs = -(-layout.panels // GEMM_PANELS)
    multiply_tokens(
        team.address,
        panels=panels,
        factor=factor,
        bits=layout.bits,
        rows=layout.rows,
        columns=layout.columns,
        chunks=chunks,
        group_shift=(layout.group // CHUNK).bit_length() - 1,
        panel_bytes=layout.panel_bytes,
        tokens=tokens,
        num_tokens=num_tokens,
        is_bfloat16=is_bfloat16,
        bias=bias,
        out=out,
        integers=integers.ctypes.data,
        token_numbers=token_numbers.ctypes.data,
        tiles_of_block=max(1, _BLOCK_BYTES // (chunks * TILE_BYTES)),
        parts=min(pairs, _PARTS_OF_THREAD * team.threads),
    )
