"""The description of a cache in its file: typed objects here, JSON in the file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..codecs import describe, described_codec
from ..layers import Placement
from ..storage import GRANULE, KVCodec, KVShape
from .plain_layers import dtype_name, named_dtype

# What the names of parts begin with that hold the tokens after a shared prefix.
TAILS = "tails."
FULL, PACKED = "full", "packed"
FORMAT = "hf_hybrid_cache"
VERSION = "5"


@dataclass(frozen=True)
class States:
    """
    Keys and values of a full-attention layer.

    Attributes:
        batch: sequences, of which `batch // prefixes` continue each prefix.
        prefixes: sequences that the parts hold which are no tails; as many as `batch` where nothing is shared.
        device: where the model computed them; text, because there may be no such device here.
        entries: how many there are in each part of the store.
    """

    batch: int
    prefixes: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str
    device: str
    entries: dict[str, int]

    @classmethod
    def of(cls, shape: KVShape, entries: dict[str, int], prefixes: int | None = None) -> "States":
        """Describe a store with states of `shape`."""
        sizes = shape.batch, prefixes or shape.batch, shape.num_kv_heads, shape.key_dim, shape.value_dim
        return cls(*sizes, dtype_name(shape.key_dtype), dtype_name(shape.value_dtype), str(shape.device), entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence."""
        sizes = {PACKED: GRANULE, f"{TAILS}{PACKED}": GRANULE}
        return sum(number * sizes.get(part, 1) for part, number in self.entries.items())

    @property
    def is_shared(self) -> bool:
        """Whether sequences share a prefix, after which their tails come."""
        return any(name.startswith(TAILS) for name in self.entries)

    def shape_on(self, device_of: Callable[[str], Any]) -> KVShape:
        """The shape of the states, of prefixes where these are shared, where they are to be."""
        dtypes = named_dtype(self.key_dtype), named_dtype(self.value_dtype)
        return KVShape(self.prefixes, self.num_kv_heads, self.key_dim, self.value_dim, *dtypes, device_of(self.device))


@dataclass(frozen=True)
class LayerDescription:
    """
    The description of one layer.

    Attributes:
        type: name of its class.
        states: of a layer of ours that holds any.
        attributes: of a layer of transformers' own.
    """

    type: str
    states: States | None = None
    attributes: dict[str, Any] | None = None


@dataclass(frozen=True)
class CacheDescription:
    """
    The description of a cache.

    Attributes:
        package_version: that wrote it.
        transformers_version: that it was written with.
        model: traits of the model.
        placement: of the layers.
        max_length: that the cache was made for, or 0.
        codecs: by layer, without the factors that they scale channels by, which are tensors of the file.
        layers: all of them.
        document_tokens: of the saved tokens, how many are those of a document at the start; `None` where that was not
            told.
        sees_as_alone: whether tokens see the codes that they would see had they come one by one.
    """

    package_version: str
    transformers_version: str
    model: dict[str, Any]
    placement: Placement
    max_length: int
    codecs: dict[int, KVCodec]
    layers: tuple[LayerDescription, ...]
    document_tokens: int | None
    sees_as_alone: bool

    def to_json(self) -> str:
        """
        Return the description as text, which `from_json` reads.

        Raises:
            ValueError: a codec, or a value, that cannot be described.
        """
        placement, cpu_decode = dict(vars(self.placement)), self.placement.cpu_decode
        placement["cpu_decode"] = sorted(cpu_decode) if isinstance(cpu_decode, frozenset) else cpu_decode
        tree = {
            "package_version": self.package_version,
            "transformers_version": self.transformers_version,
            "model": self.model,
            "placement": placement,
            "max_length": self.max_length,
            "codecs": [[layer, describe(codec)] for layer, codec in self.codecs.items()],
            "layers": [asdict(layer) for layer in self.layers],
            "document_tokens": self.document_tokens,
            "sees_as_alone": self.sees_as_alone,
        }
        return json.dumps(tree, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "CacheDescription":
        """
        Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            return _described(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ImportError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _described(tree: Any) -> CacheDescription:
    placement = _mapping(tree["placement"])
    for name in ("offload", "pin_memory"):
        if placement[name] not in (True, False, None):
            raise ValueError(f"{name} is {placement[name]!r}")
    document_tokens = tree.get("document_tokens")  # older files have none, nor the last one
    return CacheDescription(
        _text(tree["package_version"]),
        _text(tree["transformers_version"]),
        _mapping(tree["model"]),
        Placement(**placement),
        _count(tree["max_length"]),
        {_count(layer): described_codec(_mapping(codec)) for layer, codec in tree["codecs"]},
        described_layers(tree["layers"]),
        None if document_tokens is None else _count(document_tokens),
        tree.get("sees_as_alone", False) is True,
    )


def described_layers(trees: Any) -> tuple[LayerDescription, ...]:
    """
    Read the descriptions of all layers from JSON, where each is a mapping of the attributes.

    Raises:
        ValueError: they are something else.
        TypeError, KeyError, AttributeError: likewise.
    """
    return tuple(_layer(_mapping(each)) for each in trees)


def _layer(tree: Mapping[str, Any]) -> LayerDescription:
    states, attributes = tree["states"], tree["attributes"]
    if states is not None:
        states = States(
            _count(states["batch"], 2**16),
            _count(states["prefixes"], 2**16),
            _count(states["num_kv_heads"], 2**16),
            _count(states["key_dim"], 2**16),
            _count(states["value_dim"], 2**16),
            _text(states["key_dtype"]),
            _text(states["value_dtype"]),
            _text(states["device"]),
            {part: _count(number) for part, number in _mapping(states["entries"]).items()},
        )
        if states.prefixes != states.batch and (not states.is_shared or not states.prefixes):
            raise ValueError(f"{states.batch} sequences do not continue {states.prefixes} prefixes")
        if states.batch % max(1, states.prefixes):
            raise ValueError(f"{states.batch} sequences do not continue {states.prefixes} prefixes alike")
    return LayerDescription(_text(tree["type"]), states, None if attributes is None else _mapping(attributes))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _count(value: Any, limit: int = 2**40) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is not a count")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping")
    return value
