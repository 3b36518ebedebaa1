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


def batch_of(layer: Any) -> int | None:
    """Return the number of sequences whose keys a layer of transformers' own keeps; `None` if it keeps none."""
    keys = getattr(layer, "keys", None)
    return len(keys) if isinstance(keys, torch.Tensor) and keys.numel() else None


def num_sequences_of(layer: Any) -> int | None:
    """Return the number of sequences that a layer of transformers' own keeps states of; `None` if it keeps none."""
    return next((len(tensor) for tensor in tensors_of(layer) if tensor.dim()), None)


def repeat_sequences_of(layer: Any, repeats: int) -> None:
    """Repeat every sequence of a layer side by side."""
    held = num_sequences_of(layer)
    if held is not None:
        layer.reorder_cache(torch.arange(held).repeat_interleave(repeats))


def select_sequences_of(layer: Any, indices: torch.Tensor) -> None:
    """Keep the sequences that `indices` (integers or a boolean mask) selects."""
    held = num_sequences_of(layer)
    if held is not None:
        # transformers selects all states of every type in this way alone.
        layer.reorder_cache(torch.arange(held)[torch.as_tensor(indices, device="cpu")])


def copy_of(layer: Any) -> Any:
    """Copy a layer with its tensors, and no more memory than these take."""
    twin = copy.copy(layer)
    _replace_items(twin, lambda item: item.clone() if isinstance(item, torch.Tensor) else item)
    return twin


def put_back(layer: Any, kept: Any) -> None:
    """Make a layer what another one of its type is, which must not be used afterwards."""
    if hasattr(layer, "record_past"):  # assisted decoding may have begun, or ended, since
        kept.record_past |= layer.record_past
    layer.__dict__ = vars(kept)  # at once, so that no interruption leaves a half of it


def can_be_cropped(layer: Any, tokens_to_remove: int, num_tokens: int) -> bool:
    """
    Return whether a layer of transformers' own can go back to what it was so many tokens ago.

    transformers does not tell: some types raise an error, and some go on with states that are not those of before.

    Args:
        layer: of any type.
        tokens_to_remove: how many.
        num_tokens: those of the cache.
    """
    storing, cropping = (_definer(type(layer), method) for method in ("update", "crop"))
    if storing is not cropping and issubclass(storing, cropping):
        return False  # it stores more than what it inherits to be cropped
    records_past = getattr(layer, "record_past", False)

    def holds(states: torch.Tensor, dim: int, needed: int) -> bool:
        held = states.shape[dim]
        return records_past and held >= min(num_tokens, needed + tokens_to_remove)

    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(states is not None for states in layer.recurrent_states.values()):
            return False
        for index, states in layer.conv_states.items():
            if states is not None and not holds(states, -1, layer.conv_kernel_size[index] or 0):
                return False
    elif not layer.is_croppable:
        return False
    is_full = getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window
    return not is_full or holds(layer.keys, 2, layer.sliding_window - 1)


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


def _definer(kind: type, method: str) -> type:
    return next((each for each in kind.__mro__ if method in vars(each)), object)
