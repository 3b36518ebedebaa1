"""Attention to a layer's tokens in parts, and the parts merged: launches of the kernels, where Triton runs any."""

import importlib.util
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from ..kernels import PackedLayout

# From this capability on, devices of NVIDIA multiply bfloat16.
_LEAST_CAPABILITY = (8, 0)
# Programs for each of a device's processors, so that some read while others compute.
_PROGRAMS_EACH = 4
# With larger tiles a program takes more memory than its threads can share on desktop GPUs (99 KiB).
_LEAST_TILE, _MOST_BYTES_A_COLUMN, LONGEST_HEAD = 16, 64, 256
# Triton's, said because its default changes.
OPTIONS = {"enable_fp_fusion": True}


class Codes(NamedTuple):
    """
    Quantized blocks of a layer.

    Attributes:
        keys: packed blocks, uint8 `[batch, num_kv_heads, blocks, bytes]`; a packed block is one piece of memory.
        values: likewise.
        first: tokens in full precision before them.
        key_layout: of the packed blocks of keys.
        value_layout: of those of values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first: int
    key_layout: PackedLayout
    value_layout: PackedLayout


class Splits(NamedTuple):
    """
    The partial attention of each part of the tokens.

    Attributes:
        outs: float32 `[batch, num_kv_heads, rows, splits, value_dim]`, softmax of a part's scores times its values; of
            all parts but the last as the codes have them, rotated and mixed.
        lse: float32 `[batch, num_kv_heads, rows, splits]`, natural log of the sum of the exponentials of its
            scores; minus infinity where none of its tokens is seen.
    """

    outs: torch.Tensor
    lse: torch.Tensor


def runs_on(device: torch.device) -> bool:
    """Whether Triton compiles kernels for `device` here, or interprets them for any (`TRITON_INTERPRET=1`)."""
    if not _is_installed():
        return False
    return _is_interpreted() or (device.type == "cuda" and _compiles_for(device))


def _is_interpreted() -> bool:
    """Whether Triton was told to interpret kernels, which is for tests, and slow."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _compiles_for(device: torch.device) -> bool:
    """Whether a first kernel runs: Triton needs, besides itself, a compiler of C, and a device that it knows."""
    try:
        if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            return False
        from .split_kernels import add_one

        number = torch.zeros(1, dtype=torch.int32, device=device)
        with _on_device(device):
            add_one[(1,)](number)
        if number.item() != 1:
            raise RuntimeError("a kernel that adds one did not.")
    except Exception as error:  # any error of torch, Triton, the C compiler or the driver
        lines = str(error).splitlines() or [type(error).__name__]
        warnings.warn(
            f"Triton is installed, but runs no kernel on {device}: {lines[0]} Quantized keys and values are dequantized"
            " for each use instead, which is right and slower.",
            stacklevel=2,
        )
        return False
    return True


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on `device`, and on its current stream, inside the block: Triton asks for neither."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def attend_in_splits(
    query: torch.Tensor,
    turned: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: Codes,
    length: int,
    mask: torch.Tensor | None,
    scale: float,
) -> Splits:
    """
    Attend to quantized blocks, and, as the last part, to the tokens in full precision around them.

    Args:
        query: `[batch, num_kv_heads, rows, key_dim]`; rows are the queries of one query head after the other.
        turned: float32, the same as the products with codes need them.
        keys: in full precision, `[batch, num_kv_heads, tokens, key_dim]`: before the quantized blocks, and after them.
        values: likewise, `[batch, num_kv_heads, tokens, value_dim]`.
        codes: the blocks.
        length: queries of one query head.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, length, tokens]`, where
            any of the first three may be 1.
        scale: of the scores.

    Returns:
        each part's result; all tensors are on one device, on which Triton runs (`runs_on`).
    """
    from .split_kernels import attend_kernel

    batch, heads, num_rows, key_dim = query.shape
    value_dim, num_blocks = values.shape[3], codes.keys.shape[2]
    shape, options = shape_arguments(query.dtype, num_rows, (key_dim, value_dim), codes.key_layout, codes.value_layout)
    row_tiles = -(-num_rows // shape["ROWS_TILE"])
    # All programs at once, the one for the tokens in full precision too.
    wanted = max(1, _PROGRAMS_EACH * _num_processors(query.device) // (batch * heads * row_tiles) - 1)
    blocks_each = max(1, -(-num_blocks // wanted))
    num_splits = -(-num_blocks // blocks_each) + 1
    # Only views of unusual layouts are copied.
    query, keys, values = (each if each.stride(3) == 1 else each.contiguous() for each in (query, keys, values))
    outs = query.new_empty((batch, heads, num_rows, num_splits, value_dim), dtype=torch.float32)
    lse = query.new_empty((batch, heads, num_rows, num_splits), dtype=torch.float32)
    kind, seen, mask_strides = _mask_arguments(mask, query)
    of_codes, of_states = types_of_products(query.dtype)
    with _on_device(query.device):
        attend_kernel[(batch * heads, num_splits, row_tiles)](
            query,
            turned.contiguous(),
            keys,
            values,
            codes.keys,
            codes.values,
            seen,
            outs,
            lse,
            scale,
            num_blocks,
            codes.first,
            keys.shape[2],
            blocks_each,
            num_rows,
            heads,
            length,
            *query.stride()[:3],
            *keys.stride()[:3],
            *values.stride()[:3],
            *codes.keys.stride()[:3],
            *codes.values.stride()[:3],
            *mask_strides,
            MASK=kind,
            OF_CODES=of_codes,
            OF_STATES=of_states,
            **shape,
            **options,
        )
    return Splits(outs, lse)


def merged(splits: Splits, result_map: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """
    Merge all parts.

    Args:
        splits: of one call.
        result_map: float32 `[num_kv_heads, value_dim, value_dim]`, or `[1, value_dim, value_dim]` for all heads, what
            results of codes are multiplied with from the right; `None` for nothing.
        dtype: of the result.

    Returns:
        `[batch, num_kv_heads, rows, value_dim]`; zeros where no token is seen.
    """
    from .split_kernels import merge_kernel

    batch, heads, num_rows, num_splits, value_dim = splits.outs.shape
    result = splits.outs.new_empty((batch, heads, num_rows, value_dim), dtype=dtype)
    has_one_each = result_map is not None and result_map.shape[0] > 1
    with _on_device(result.device):
        merge_kernel[(batch * heads * num_rows,)](
            splits.outs,
            splits.lse,
            splits.outs if result_map is None else result_map,
            result,
            num_rows,
            heads,
            num_splits,
            value_dim * value_dim if has_one_each else 0,
            VALUE_DIM=value_dim,
            VALUE_TILE=_filled(value_dim),
            IS_MAPPED=result_map is not None,
            **OPTIONS,
        )
    return result


def shape_arguments(
    dtype: torch.dtype, num_rows: int, dims: tuple[int, int], key_layout: PackedLayout, value_layout: PackedLayout
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the kernel's compile-time constants for these states, and the options for Triton."""
    constants = {
        "KEY_DIM": dims[0],
        "KEY_BITS": key_layout.bits,
        "KEY_INNER": key_layout.inner,
        "KEY_GROUP": key_layout.group,
        "KEY_TILE": _filled(key_layout.inner),
        "VALUE_DIM": dims[1],
        "VALUE_BITS": value_layout.bits,
        "VALUE_LANES": value_layout.lanes,
        "VALUE_GROUP": value_layout.group,
        "VALUE_TILE": _filled(value_layout.lanes),
        "ROWS_TILE": min(_filled(num_rows), _MOST_BYTES_A_COLUMN // dtype.itemsize),
    }
    # Blocks that are read ahead take memory that threads share, of which numbers of 32 bits take twice as much.
    is_large = max(dims) > 128 and key_layout.bits + value_layout.bits > 12
    return constants, OPTIONS | {"num_stages": 1 if dtype == torch.float32 else 2 if is_large else 3}


def types_of_products(dtype: torch.dtype) -> tuple[Any, Any]:
    """
    Return the dtypes in which products with codes, and with states of `dtype`, are computed.

    bfloat16 holds a code's number as well as states of bfloat16 are held, and is never too large.
    """
    import triton.language as tl

    # The interpreter computes float16 and bfloat16 otherwise than a device does.
    if dtype not in (torch.float16, torch.bfloat16) or _is_interpreted():
        return tl.float32, tl.float32
    return tl.bfloat16, tl.float16 if dtype == torch.float16 else tl.bfloat16


def _filled(dim: int) -> int:
    """Round up to a power of two that products accept."""
    return max(_LEAST_TILE, 1 << (dim - 1).bit_length())


def _mask_arguments(mask: torch.Tensor | None, query: torch.Tensor) -> tuple[str, torch.Tensor, tuple[int, int, int]]:
    """Return the kind of a mask, the tensor that the kernel reads, and its strides, 0 where one value is for all."""
    if mask is None:
        return "none", query, (0, 0, 0)
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    batch, head, row = (0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride(), strict=False))
    if mask.dtype == torch.bool:
        return "visible", mask.view(torch.uint8), (batch, head, row)
    return "bias", mask, (batch, head, row)


@cache
def _num_processors(device: torch.device) -> int:
    # The interpreter runs one program after the other; some parts are made there, too, to be merged.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
