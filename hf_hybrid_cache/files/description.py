"""The description of a saved cache, and of its layers: typed objects here, JSON in a file."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from ..layers import Placement
from ..scalars import as_count
from ..storage import GRANULE, KVShape
from .tensor_file import DTYPE_NAMES

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True)
class States:
    """
    Keys and values of a full-attention layer.

    Attributes:
        batch: sequences.
        key_dtype: name of the type of keys, such as "float32".
        value_dtype: likewise of values.
        device: where the model computed them; text, because there may be no such device here.
        entries: how many there are in each part of the store.
    """

    batch: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str
    device: str
    entries: dict[str, int]

    def __post_init__(self) -> None:
        for size in (self.batch, self.num_kv_heads, self.key_dim, self.value_dim):
            # Tokens without any bytes could be as many as a file says.
            if not as_count(size, 2**16):
                raise ValueError(f"there are no states in {self}")
        for number in self.entries.values():
            as_count(number)
        if {self.key_dtype, self.value_dtype} - DTYPES.keys():
            raise ValueError(f"{self.key_dtype!r} or {self.value_dtype!r} is not a type of tensors")

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence."""
        return sum(number * (GRANULE if part == "packed" else 1) for part, number in self.entries.items())

    def shape_on(self, device: torch.device) -> KVShape:
        """Return the shape of the states."""
        dtypes = DTYPES[self.key_dtype], DTYPES[self.value_dtype]
        return KVShape(self.batch, self.num_kv_heads, self.key_dim, self.value_dim, *dtypes, device)


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
class SavedLayers:
    """
    The description of layers in a file.

    Attributes:
        layers: all of the cache.
        codecs: descriptions of those that the file has, by layer, without the tensors that they were chosen by.
    """

    layers: tuple[LayerDescription, ...]
    codecs: dict[int, dict[str, Any]]

    def to_json(self) -> str:
        """Return the description as text, which `from_json` reads; `ValueError` if JSON does not have some of it."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; `ValueError` if it is something else."""
        try:
            tree = json.loads(text)
            layers = tuple(_read_layer(**each) for each in tree.pop("layers"))
            codecs = {as_count(int(index), len(layers)): dict(codec) for index, codec in tree.pop("codecs").items()}
            return cls(layers, codecs, **tree)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_layer(type: str, states: dict[str, Any] | None, attributes: dict[str, Any] | None) -> LayerDescription:
    return LayerDescription(type, None if states is None else States(**states), attributes and dict(attributes))


@dataclass(frozen=True)
class CacheDescription(SavedLayers):
    """
    The description of a cache.

    Attributes:
        transformers_version: that it was written with.
        model: traits of the model.
        placement: of the layers.
        max_length: that the cache was made for, or 0.
        document_tokens: of the saved tokens, how many are those of a document at the start; `None` where that was not
            told.
    """

    transformers_version: str
    model: dict[str, Any]
    placement: Placement
    max_length: int
    document_tokens: int | None

    def __post_init__(self) -> None:
        if isinstance(self.placement, dict):  # of JSON
            object.__setattr__(self, "placement", Placement(**self.placement))
        are_flags = {self.placement.offload, self.placement.pin_memory} <= {True, False}
        if not are_flags or not isinstance(self.model, dict):
            raise ValueError(f"{self.placement} is no placement, or {self.model} no model")
        as_count(self.max_length)
        if self.document_tokens is not None:
            as_count(self.document_tokens)
