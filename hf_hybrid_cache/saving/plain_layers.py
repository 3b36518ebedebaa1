"""
Layers of transformers' own as plain values and tensors.

Their types come and go with versions, so none is named here: whatever attributes a layer has are kept, and a layer with
an attribute that is more than numbers, text, tensors and dicts of these is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .container import DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def dtype_name(dtype: torch.dtype) -> str:
    """
    Return the name of a dtype, such as "float32".

    Raises:
        ValueError: there is no such type in a file.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"{dtype} cannot be saved; only {', '.join(_DTYPES)} can.")
    return name


def named_dtype(name: Any) -> torch.dtype:
    """
    Return the dtype of that name.

    Raises:
        ValueError: there is none in a file.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{name!r} is not a type of tensors")
    return _DTYPES[name]


def attributes_of(layer: Any) -> dict[str, Any]:
    """
    Return the attributes of a layer for JSON; a tensor becomes its name among `tensors_by_name` and its device.

    Raises:
        ValueError: there is something that JSON does not have.
    """
    attributes = {}
    for name, value in vars(layer).items():
        try:
            attributes[name] = _to_json(name, value)
        except ValueError as error:
            raise ValueError(f"{type(layer).__name__} has {name}, which cannot be saved: {error}.") from None
    return attributes


def tensors_by_name(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a layer's attributes, by name."""
    return {name: tensor for attribute, value in vars(layer).items() for name, tensor in _tensors(attribute, value)}


def restore(
    layer: Any,
    attributes: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    device_of: Callable[[str], torch.device],
) -> None:
    """
    Give a new layer the attributes of the saved one.

    Args:
        layer: of the same type.
        attributes: of the other.
        tensors: of the other, by name.
        device_of: where to put what was on a device.

    Raises:
        ValueError: the layer has other attributes, as in another version of transformers.
    """
    if missing := vars(layer).keys() - attributes.keys():
        raise ValueError(f"lacks {', '.join(sorted(missing))}, which {type(layer).__name__} has here")
    values = {name: _from_json(value, tensors, device_of) for name, value in attributes.items()}
    for name, value in values.items():
        # Some attributes come with the first states; none of them takes the place of a method.
        of_type = getattr(type(layer), name, None)
        if name not in vars(layer) and (callable(of_type) or isinstance(of_type, property)):
            raise ValueError(f"has {name}, which is not an attribute of {type(layer).__name__} here")
        setattr(layer, name, value)


def _to_json(name: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        dtype_name(value.dtype)
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _to_json(f"{name}.{key}", each)] for key, each in value.items()]}
    raise ValueError(f"it holds a {type(value).__name__}")


def _from_json(tree: Any, tensors: Mapping[str, torch.Tensor], device_of: Callable[[str], torch.device]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]].to(device_of(tree["device"]))
    if "dtype" in tree:
        return named_dtype(tree["dtype"])
    if "device" in tree:
        return device_of(tree["device"])
    return {key: _from_json(each, tensors, device_of) for key, each in tree["dict"]}


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
