"""Describing a codec for a file, and making it from the description."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..storage import KVCodec
from .channel_scaling import ChannelScaling
from .minmax import MinMaxCodec, minmax
from .quanto import QuantoCodec, quanto

_MAKERS: dict[str, Callable[..., KVCodec]] = {"minmax": minmax, "quanto": quanto}


def describe(codec: KVCodec) -> dict[str, Any]:
    """
    Describe a codec by the name and the arguments of the function that makes it, without the tensors of `weights_of`.

    Raises:
        ValueError: none of them does.
    """
    keys, values = codec.keys, codec.values
    tree: dict[str, Any] = {}
    if isinstance(keys, MinMaxCodec) and isinstance(values, MinMaxCodec):
        tree = {
            "name": "minmax",
            "bits": [keys.bits, values.bits],
            "group_size": keys.group_size,
            "sink_tokens": codec.sink_tokens,
            "rotate": keys.is_rotated if codec.is_fitted else "auto",
            "auto_bits": codec.auto_bits,
        }
    elif isinstance(keys, QuantoCodec):
        tree = {"name": "quanto", "bits": keys.bits, "sink_tokens": codec.sink_tokens}
    if not tree or described_codec(tree, weights_of(codec)) != codec:
        raise ValueError(f"There is no way to describe {codec}: only what {' and '.join(_MAKERS)} make can be saved.")
    return tree


def weights_of(codec: KVCodec) -> dict[str, torch.Tensor]:
    """Return the channel scaling of keys and values, float32, by name; empty where channels are not scaled."""
    found = {}
    for role, each in (("keys", codec.keys), ("values", codec.values)):
        if isinstance(each, MinMaxCodec) and each.channel_scaling is not None:
            found[role] = each.channel_scaling.weights
    return found


def described_codec(tree: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None = None) -> KVCodec:
    """
    Make the codec that `describe` described.

    Args:
        tree: its description.
        weights: as of `weights_of`.

    Raises:
        ValueError: `tree` describes none.
        ImportError: what it needs is not installed.
    """
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}
    name, auto_bits = arguments.pop("name", None), arguments.pop("auto_bits", False)
    if not isinstance(auto_bits, bool):
        raise ValueError(f"auto_bits must be True or False, got {auto_bits!r}.")
    if name not in _MAKERS:
        raise ValueError(f"{name!r} is not one of the codecs {', '.join(_MAKERS)}.")
    try:
        codec = _MAKERS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{tree} are no arguments of {name}: {error}") from error
    for role, each in (weights or {}).items():
        codec = replace(codec, **{role: replace(getattr(codec, role), channel_scaling=ChannelScaling(each))})
    return replace(codec, auto_bits=auto_bits) if auto_bits else codec
