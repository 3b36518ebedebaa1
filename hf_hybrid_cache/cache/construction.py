"""Making the layers of a new cache, with all arguments checked."""

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..layers import HybridLayer, LayerStores, Placement, WindowLayer, checked_count, window_of
from ..processes import Peers
from ..scalars import as_integer
from ..storage import InitialCapacity, KVCodec
from .contents import Contents


def new_contents(
    config: PreTrainedConfig,
    placement: Placement | None,
    max_length: int | None,
    codec: KVCodec | Mapping[int, KVCodec] | None,
    peers: Peers | None,
) -> Contents:
    """Make the layers of a cache; see `HybridCache` for the arguments, and for the errors."""
    _require_instance("placement", placement, Placement, "Placement(offload=True)")
    for each in codec.values() if isinstance(codec, Mapping) else [codec]:
        _require_instance("codec", each, KVCodec, "minmax(4)")
    if max_length is not None:
        max_length = checked_count("max_length", max_length)
    placement = _checked_placement(placement or Placement(), peers)
    text_config = config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=config).layers
    # For encoder-decoder models with different numbers of layers, transformers makes the encoder's number.
    del layers[getattr(text_config, "num_decoder_layers", None) or len(layers) :]
    ours = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    given = codec if isinstance(codec, Mapping) else dict.fromkeys(ours, codec)
    codecs = {
        index if (number := as_integer(index)) is None else number: each
        for index, each in given.items()
        if each is not None
    }
    if unknown := sorted(codecs.keys() - ours):
        raise ValueError(f"codec names layers {unknown}; the model's full-attention layers are {ours}.")
    windows = {index: window for index, layer in enumerate(layers) if (window := window_of(layer)) is not None}
    capacity = InitialCapacity.expecting(max_length, getattr(text_config, "max_position_embeddings", None))
    if not ours and not windows:
        _warn_of_nothing_to_do(layers)
    stores = LayerStores(placement, capacity, ours, windows, codecs, text_config, peers)
    for index in ours:
        layers[index] = HybridLayer(index, stores)
    for index, window in windows.items():
        layers[index] = WindowLayer(index, stores, window)
    return Contents(layers, stores)


def require_config(config: object) -> None:
    """Raise a `TypeError` unless a config is one of transformers'."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a transformers config such as model.config, got {_kind_of(config)}.")


def _require_instance(argument: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{argument} must be a {kind.__name__} such as {example}, or None, got {_kind_of(value)}.")


def _kind_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _checked_placement(placement: Placement, peers: Peers | None) -> Placement:
    """Return the placement; for shards with attention on the CPU."""
    if peers is not None and (placement.offload or placement.device_tokens or placement.cpu_decode not in (None, True)):
        raise ValueError(
            "With group= all layers are kept in host memory and attended to there: leave out offload, device_tokens, "
            "and cpu_decode unless it is True."
        )
    return placement if peers is None or placement.cpu_decode else replace(placement, cpu_decode=True)


def _warn_of_nothing_to_do(layers: Iterable[object]) -> None:
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
    # The warning is of who makes the cache, by whichever class.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "No layer of this model attends to its whole context, or to a window of it: its layers are transformers' own "
        f"({kinds}), and this cache changes nothing. They hold little; transformers' DynamicCache does the same.",
        stacklevel=level,
    )
