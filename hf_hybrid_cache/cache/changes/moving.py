"""Moving what a cache holds to another device or type."""

from typing import Any

import torch

from ...layers import HybridLayer, move_tensors_of, tensors_of
from ...storage import HostMemoryError
from ..contents.contents import Contents
from ..contents.memory import advised


def move(contents: Contents, *args: Any, **kwargs: Any) -> None:
    """Move all layers, or none; see `HybridCache.to` for arguments and errors."""
    parsed: tuple[torch.device | None, torch.dtype | None, bool, object] = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, is_non_blocking, _ = parsed
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"Keys and values are floating-point numbers, and cannot be {dtype}.")
    if dtype is None and (device is None or is_non_blocking or "non_blocking" in kwargs):
        return
    if device is not None and device.type == "meta":
        raise ValueError("Keys and values cannot be moved to meta, which holds nothing. Use cache.reset().")
    if device is not None:
        device = torch.empty(0, device=device).device  # with its index, as the states of the model have it
    layers = (*contents.layers, *contents.checkpoints.stock_layers())
    before = [(layer, *place) for layer in layers if (place := _place_of(layer)) is not None]
    try:
        for layer, held_on, _ in before:
            _move(layer, device or held_on, dtype)
    except BaseException as error:
        for each in before:
            _move(*each)
        if isinstance(error, HostMemoryError):
            changes: dict[str, Any] = {} if dtype is None else {"key_dtype": dtype, "value_dtype": dtype}
            if device is not None:
                changes["device"] = device
            raise advised(error, contents, contents.num_tokens, **changes) from None
        raise


def _place_of(layer: object) -> tuple[torch.device, torch.dtype] | None:
    """Return device and type of a layer's states; `None` for an empty layer."""
    if isinstance(layer, HybridLayer):
        return None if layer.store is None else (layer.device, layer.dtype)
    return next(((each.device, each.dtype) for each in tensors_of(layer) if each.is_floating_point()), None)


def _move(layer: object, device: torch.device, dtype: torch.dtype | None) -> None:
    if isinstance(layer, HybridLayer):
        layer.to(device, dtype)
    else:
        move_tensors_of(layer, device, dtype)
