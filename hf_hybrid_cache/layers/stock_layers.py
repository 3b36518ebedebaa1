"""Tensors that transformers' own layers keep."""

from collections.abc import Iterator
from typing import Any

import torch


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Tensors that a layer of transformers' own keeps, in attributes or in dicts of them."""
    for value in vars(layer).values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def move_tensors_of(layer: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move those tensors to `device`, floating ones as `dtype`."""

    def moved(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, dtype if item.is_floating_point() else None)
        return item

    for name, value in vars(layer).items():
        setattr(
            layer, name, {key: moved(item) for key, item in value.items()} if isinstance(value, dict) else moved(value)
        )
    if getattr(layer, "is_initialized", False) and hasattr(layer, "device"):
        layer.device, layer.dtype = device, dtype or layer.dtype
