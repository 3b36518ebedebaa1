"""A codec in plain words and numbers, and back: what is kept of it in a file."""

from collections.abc import Callable, Mapping
from typing import Any

from ..storage import KVCodec
from .minmax import MinMaxCodec, minmax
from .quanto import QuantoCodec, quanto

_MAKERS: dict[str, Callable[..., KVCodec]] = {"minmax": minmax, "quanto": quanto}


def describe(codec: KVCodec) -> dict[str, Any]:
    """
    The function of this room that makes `codec`, by name, and its arguments.

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
            "rotate": keys.is_rotated,
        }
    elif isinstance(keys, QuantoCodec):
        tree = {"name": "quanto", "bits": keys.bits, "sink_tokens": codec.sink_tokens}
    if not tree or described_codec(tree) != codec:
        raise ValueError(f"There is no way to describe {codec}: only what {' and '.join(_MAKERS)} make can be saved.")
    return tree


def described_codec(tree: Mapping[str, Any]) -> KVCodec:
    """
    The codec that `describe` described.

    Raises:
        ValueError: `tree` describes none.
        ImportError: what it needs is not installed.
    """
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}
    name = arguments.pop("name", None)
    if name not in _MAKERS:
        raise ValueError(f"{name!r} is not one of the codecs {', '.join(_MAKERS)}.")
    if "rotate" in arguments and not isinstance(arguments["rotate"], bool):
        raise ValueError(f"rotate must be True or False, got {arguments['rotate']!r}.")
    try:
        return _MAKERS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{tree} are no arguments of {name}: {error}") from error
