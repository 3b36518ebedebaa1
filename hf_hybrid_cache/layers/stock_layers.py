"""The tensors that transformers' own layers keep."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionCacheLayerMixin


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a layer of transformers' own keeps, in attributes or in dicts of them."""
    for value in vars(layer).values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def num_sequences_of(layer: Any) -> int | None:
    """Return the number of sequences that a layer of transformers' own keeps states of; `None` if it keeps none."""
    return next((len(tensor) for tensor in tensors_of(layer) if tensor.dim()), None)


def copy_of(layer: Any) -> Any:
    """Copy a layer with its tensors, and no more memory than these take."""
    twin = copy.copy(layer)
    _replace_items(twin, lambda item: item.clone() if isinstance(item, torch.Tensor) else item)
    return twin


def move_tensors_of(layer: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move the layer's tensors to `device`, floating ones as `dtype`, and set the device and type that it reports."""

    def moved(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, dtype if item.is_floating_point() else None)
        if isinstance(item, torch.device):
            return device
        return (dtype or item) if isinstance(item, torch.dtype) else item

    _replace_items(layer, moved)


def follow(layer: Any, device: torch.device) -> None:
    """Move the layer's tensors to the device of its next states."""
    if getattr(layer, "device", None) not in (None, device):
        move_tensors_of(layer, device, None)


def forget_states_of(layer: Any) -> None:
    """
    Drop the states of a layer that was reset, so that it takes other inputs.

    `reset` of transformers keeps states of linear attention, which fit one batch size. With 5.17 it also keeps states
    that a layer grows by concatenation, as zeros that would be tokens of the next prompt.
    """
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
    if isinstance(layer, DynamicIndexedLayer):
        layer.indexer_keys = None
        layer.is_indexer_initialized = False
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for states in (layer.conv_states, layer.recurrent_states):
            states.update(dict.fromkeys(states))
        for are_initialized in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
            are_initialized.update(dict.fromkeys(are_initialized, False))


def _replace_items(layer: Any, replaced: Callable[[Any], Any]) -> None:
    """Replace the values of a layer's attributes, and those in attributes that are dicts."""
    for name, value in vars(layer).items():
        is_dict = isinstance(value, dict)
        setattr(layer, name, {key: replaced(item) for key, item in value.items()} if is_dict else replaced(value))
