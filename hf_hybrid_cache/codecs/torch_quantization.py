"""Min-max coding in operations of torch, for accelerators: the packed blocks are those of the kernels."""

from contextlib import AbstractContextManager, nullcontext

import torch

from ..kernels import BLOCK, LANES, NOT_FINITE, PackedLayout

_INFINITE, _ONE_BFLOAT16, _UPPER_HALF = 0x7F800000, 0x10000, -0x10000
# The range of a group of smaller numbers is finite, also where its scale is rounded up.
_SMALLEST_NORMAL, _LARGEST = 2.0**-126, 2.0**126


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Keep products on `device` in float32 where their factors are: `torch.autocast` would round these."""
    # Leaving it takes a tenth of a millisecond, and not every device has it.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def quantize_by_torch(states: torch.Tensor, layout: PackedLayout, share: float = 1.0) -> torch.Tensor:
    """
    Quantize whole blocks.

    Args:
        states: `[batch, num_kv_heads, blocks * 64, dim]`.
        layout: of the packed blocks.
        share: of the range of a group that codes cover.

    Returns:
        uint8 `[batch, num_kv_heads, blocks, layout.num_bytes]`.

    Raises:
        ValueError: some of the states are infinite or not a number, or so large, also when they are rotated, that the
            range of a group may be infinite.
    """
    turned = rotated(states.float(), layout)
    if turned.numel() and not turned.abs().amax() < _LARGEST:
        raise ValueError(NOT_FINITE)
    tiles = turned.unflatten(2, (-1, BLOCK))
    if layout.transposed:
        tiles = tiles.transpose(3, 4)
    inner, lanes = tiles.shape[3:]
    codes = tiles.new_zeros((*tiles.shape[:3], layout.inner, layout.lanes), dtype=torch.uint8)
    numbers = tiles.new_zeros((*tiles.shape[:3], 2, layout.groups, layout.inner), dtype=torch.bfloat16)
    for group in range(layout.groups):
        lane = slice(group * layout.group, min((group + 1) * layout.group, lanes))
        if lane.start < lane.stop:
            part = tiles[..., lane]
            scale, minimum = _scale_and_minimum(part, layout.bits, share)
            codes[..., :inner, lane] = _quantized(part, scale, minimum, layout.bits)
            numbers[..., 0, group, :inner] = scale.squeeze(-1).bfloat16()
            numbers[..., 1, group, :inner] = minimum.squeeze(-1).bfloat16()
    in_byte = 8 // layout.bits
    # Index 16 c + 8 h + p: c and p count pairs, h is the half of the word; a byte of a half holds `in_byte` codes.
    halves = codes.unflatten(3, (-1, 2, LANES // 2)).transpose(4, 5).flatten(3, 4)
    bytes_of = halves.unflatten(3, (-1, 2, in_byte))
    words = bytes_of[..., 0, :, :]
    for index in range(1, in_byte):
        words = words | (bytes_of[..., index, :, :] << (index * layout.bits))
    words = words.permute(0, 1, 2, 3, 6, 5, 4)
    return torch.cat([words.flatten(3), numbers.flatten(3).view(torch.uint8)], dim=3)


def dequantize_by_torch(packed: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Dequantize packed blocks: float32 `[batch, num_kv_heads, blocks * 64, dim]`."""
    in_byte, size = 8 // layout.bits, 4 * layout.words * layout.lanes
    words = packed[..., :size].unflatten(3, (layout.words, layout.lanes, 2, 2)).permute(0, 1, 2, 3, 6, 5, 4)
    codes = torch.stack([(words >> (index * layout.bits)) & (2**layout.bits - 1) for index in range(in_byte)], dim=5)
    codes = codes.flatten(3, 5).unflatten(3, (-1, LANES // 2)).transpose(4, 5).flatten(3, 5)
    numbers = packed[..., size:].contiguous().view(torch.bfloat16).float()
    numbers = numbers.unflatten(3, (2, layout.groups, layout.inner)).repeat_interleave(layout.group, dim=4)
    scale, minimum = numbers[..., : layout.lanes, :].transpose(4, 5).unbind(3)
    tiles = minimum + scale * codes
    if layout.transposed:
        tiles = tiles.transpose(3, 4)
    return rotated(tiles[..., : layout.dim].flatten(2, 3), layout)


def rotated(states: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Multiply each run of a key or value by a Hadamard matrix, which is its own inverse."""
    if layout.rotation == 1:
        return states
    matrix = states.new_ones(1, 1)
    while len(matrix) < layout.rotation:
        matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
    return (states.unflatten(3, (-1, layout.rotation)) @ (matrix * layout.rotation**-0.5)).flatten(3)


def _scale_and_minimum(part: torch.Tensor, bits: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum of groups along the last axis: bfloat16 numbers, as float32."""
    levels = 2**bits - 1
    least, most = part.amin(dim=-1, keepdim=True), part.amax(dim=-1, keepdim=True)
    if share < 1:
        cut = most * ((1 - share) / 2) - least * ((1 - share) / 2)
        least, most = least + cut, most - cut
    minimum = _rounded_down(least)
    # As the kernels divide, bit for bit.
    scale = -_rounded_down(-(most / levels - minimum / levels).clamp_min(_SMALLEST_NORMAL))
    return torch.where(most > minimum, scale, 0.0), minimum


def _quantized(part: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int) -> torch.Tensor:
    reciprocal = torch.where(scale > 0, 1 / scale, 0.0)
    code = (part * 0.5 - minimum * 0.5) * (2 * reciprocal)
    return (code + 0.5).clamp(0, 2**bits - 1).to(torch.uint8)


def _rounded_down(numbers: torch.Tensor) -> torch.Tensor:
    """Return the largest finite bfloat16 that is not above a number, or else the lowest, as float32."""
    bits = numbers.view(torch.int32)
    result = bits & _UPPER_HALF
    result = torch.where((result != bits) & (numbers < 0), result + _ONE_BFLOAT16, result)
    return torch.where((result & _INFINITE) == _INFINITE, result - _ONE_BFLOAT16, result).view(torch.float32)
