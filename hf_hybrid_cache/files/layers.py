"""
The layers of a cache as descriptions, and as sections of a file whose bytes are made when they are written.

Types of transformers' own layers come and go with versions, so none is named here: whatever attributes a layer has are
kept, and a layer with an attribute that is more than numbers, text, tensors and dicts of these is refused.

Sections are "layers.LAYER" with the tensors PART.keys and PART.values of a layer of ours or those of another one,
and "codecs.LAYER" with what a codec was, or is to be, chosen by.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..codecs import weights_of
from ..layers import HybridLayer, LayerStores
from ..storage import AnyStore, HostBlocks, ShardedStore, SharedPrefix
from .description import LayerDescription, States
from .tensor_file import Section, TensorForm, dtype_name

ROLES = ("keys", "values")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor in host memory, or of a copy there."""
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def role_names(index: int, part: str) -> list[str]:
    """Return the names of the keys and the values of a part of a layer."""
    return [f"layers.{index}/{part}.{role}" for role in ROLES]


def forms_of(run: HostBlocks, num_entries: int) -> list[TensorForm]:
    """Return the forms of keys and values in a file, as a run in host memory has them."""
    return [_form_of(each.dtype, each.stored_shape(num_entries)) for each in (run.keys, run.values)]


def described_layer(layer: Any) -> LayerDescription:
    """Describe a layer without its tensors; `ValueError` if it holds something that cannot be saved."""
    name = type(layer).__name__
    if not isinstance(layer, HybridLayer):
        return LayerDescription(name, attributes=_attributes_of(layer, {}))
    store = layer.store
    if store is None:
        return LayerDescription(name)
    entries = store.entries_together() if isinstance(store, ShardedStore) else store.entries()
    batch, heads, key_dim, value_dim, keys, values, device = store.shape
    states = States(batch, heads, key_dim, value_dim, dtype_name(keys), dtype_name(values), str(device), entries)
    return LayerDescription(name, states)


def layer_section(index: int, layer: Any) -> Section:
    """Return the section of all that a layer holds; of shards all processes make the bytes together."""
    if not isinstance(layer, HybridLayer):
        return tensor_section(f"layers.{index}", tensors_by_name(layer))
    store = layer.store
    if store is None:
        return tensor_section(f"layers.{index}", {})
    if not isinstance(store, ShardedStore):
        return rows_section(index, store, {})
    forms, both = dict[str, TensorForm](), list[tuple[str, int]]()
    for part, number in store.entries_together().items():
        forms |= zip(role_names(index, part), forms_of(store.run_for(part, 0), number), strict=True)
        both += [(part, role) for role in range(len(ROLES))]
    return Section(f"layers.{index}", forms, lambda: (map(bytes_of, store.rows_together(*each)) for each in both))


def rows_section(index: int, store: AnyStore, firsts: Mapping[str, int]) -> Section:
    """Return the section of what a store holds, of each part from its first entry in `firsts` on, that of a row."""
    forms, entries = dict[str, TensorForm](), store.entries()
    like = store.tails if isinstance(store, SharedPrefix) else store
    for part, number in entries.items():
        rows = forms_of(like.run_for(part, 0), number - firsts.get(part, 0))
        forms |= zip(role_names(index, part), rows, strict=True)

    def data() -> Iterator[Iterable[memoryview]]:
        for part in entries:
            yield from ([bytes_of(each)] for each in store.rows(part, firsts.get(part, 0)))

    return Section(f"layers.{index}", forms, data)


def codec_section(index: int, stores: LayerStores) -> Section:
    """Return the section with the scaling of a layer's codec, or with the queries that it is to be chosen by."""
    tensors, seen = weights_of(stores.codecs[index]), stores.seen_queries.get(index)
    if seen is not None:
        tensors |= {"squares": seen.squares, "number": torch.tensor([seen.number])}
    return tensor_section(f"codecs.{index}", tensors)


def tensor_section(name: str, tensors: Mapping[str, torch.Tensor]) -> Section:
    """Return the section of some tensors."""
    forms = {f"{name}/{each}": _form_of(tensor.dtype, tensor.shape) for each, tensor in tensors.items()}
    return Section(name, forms, lambda: ([bytes_of(tensor)] for tensor in tensors.values()))


def tensors_by_name(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in the attributes of a layer of transformers' own, by name."""
    tensors: dict[str, torch.Tensor] = {}
    _attributes_of(layer, tensors)
    return tensors


def _form_of(dtype: torch.dtype, shape: Iterable[int]) -> TensorForm:
    return TensorForm(dtype_name(dtype), tuple(shape))


def _attributes_of(layer: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the attributes of a layer for JSON; add their tensors, which these name, to `tensors`."""
    attributes = {}
    for name, value in vars(layer).items():
        try:
            attributes[name] = _to_json(name, value, tensors)
        except ValueError as error:
            raise ValueError(f"{type(layer).__name__} has {name}, which cannot be saved: {error}.") from None
    return attributes


def _to_json(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        dtype_name(value.dtype)
        if tensors.setdefault(name, value) is not value:
            raise ValueError(f"two of its tensors are named {name}")
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _to_json(f"{name}.{key}", each, tensors)] for key, each in value.items()]}
    raise ValueError(f"it holds a {type(value).__name__}")
