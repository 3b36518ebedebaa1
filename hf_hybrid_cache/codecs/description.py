"""Describing a codec for a file, and making it from the description."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..storage import KVCodec
from .channel_scaling import ChannelScaling
from .minmax import minmax, minmax_codecs
from .quanto import QuantoCodec, quanto


def _arguments_of_minmax(codec: KVCodec) -> dict[str, Any] | None:
    if (both := minmax_codecs(codec)) is None:
        return None
    keys, values = both
    return {
        "bits": [keys.bits, values.bits],
        "group_size": keys.group_size,
        "sink_tokens": codec.sink_tokens,
        "rotate": keys.is_rotated if codec.is_fitted else "auto",
        "auto_bits": codec.auto_bits,
    }


def _arguments_of_quanto(codec: KVCodec) -> dict[str, Any] | None:
    is_quanto = isinstance(codec.keys, QuantoCodec)
    return {"bits": codec.keys.bits, "sink_tokens": codec.sink_tokens} if is_quanto else None


# By name the function that makes a codec, and what returns its arguments for one that it may have made, else `None`.
_CODECS: dict[str, tuple[Callable[..., KVCodec], Callable[[KVCodec], dict[str, Any] | None]]] = {
    "minmax": (minmax, _arguments_of_minmax),
    "quanto": (quanto, _arguments_of_quanto),
}


def describe(codec: KVCodec) -> dict[str, Any]:
    """
    Describe a codec by the name and the arguments of the function that makes it, without the tensors of `weights_of`.

    Raises:
        ValueError: none of them does.
    """
    for name, (_, arguments_of) in _CODECS.items():
        if (arguments := arguments_of(codec)) is not None:
            tree = {"name": name} | arguments
            if described_codec(tree, weights_of(codec)) == codec:
                return tree
    raise ValueError(f"There is no way to describe {codec}: only what {' and '.join(_CODECS)} make can be saved.")


def weights_of(codec: KVCodec) -> dict[str, torch.Tensor]:
    """Return the channel scaling of keys and values, float32, by name; empty where channels are not scaled."""
    both = minmax_codecs(codec)
    if both is None:
        return {}
    scalings = {role: each.channel_scaling for role, each in zip(("keys", "values"), both, strict=True)}
    return {role: scaling.weights for role, scaling in scalings.items() if scaling is not None}


def is_form_of(codec: KVCodec, asked_for: KVCodec) -> bool:
    """Return whether a codec is the one that was asked for, or a form of it that a cache has chosen."""
    both, wanted = minmax_codecs(codec), minmax_codecs(asked_for)
    if codec == asked_for or asked_for.is_fitted or both is None or wanted is None:
        return codec == asked_for
    if (codec.sink_tokens, codec.auto_bits) != (asked_for.sink_tokens, asked_for.auto_bits):
        return False
    return both[0].channel_scaling is not None and all(
        chosen.group_size == asked.group_size
        and (chosen.bits == asked.bits or (codec.auto_bits and chosen.bits > asked.bits))
        for chosen, asked in zip(both, wanted, strict=True)
    )


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
    if name not in _CODECS:
        raise ValueError(f"{name!r} is not one of the codecs {', '.join(_CODECS)}.")
    make, _ = _CODECS[name]
    try:
        codec = make(**arguments)
    except TypeError as error:
        raise ValueError(f"{tree} are no arguments of {name}: {error}") from error
    for role, each in (weights or {}).items():
        codec = replace(codec, **{role: replace(getattr(codec, role), channel_scaling=ChannelScaling(each))})
    return replace(codec, auto_bits=auto_bits) if auto_bits else codec
