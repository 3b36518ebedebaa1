"""A cache's layers as sections of a file: which tensors there are, and the tensors themselves when they are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs import weights_of
from ..layers import HybridLayer
from ..storage import HostStore, KVCodec, LocalStore, QuantizedStore, ShardedStore, SplitStore, WholePart
from .container import TensorForm
from .description import LayerDescription, States
from .plain_layers import attributes_of, tensors_by_name

TOKEN_IDS = "token_ids"
ROLES = ("keys", "values")
CODEC_SECTIONS = "codecs."
INDEX_SECTIONS = "index."

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Section:
    """
    Tensors that have a checksum in common.

    Attributes:
        name: of the section.
        forms: of the tensors, by name.
        pieces: makes the tensors, in host memory and in the order of `forms`: for each the pieces, along the first
            axis, that it is put together of.
    """

    name: str
    forms: Mapping[str, TensorForm]
    pieces: Callable[[], Iterable[Iterable[torch.Tensor]]]


def layer_name(index: int) -> str:
    return f"layers.{index}"


def codec_name(index: int) -> str:
    """Of the section of what the codec of a layer was chosen to be."""
    return f"{CODEC_SECTIONS}{index}"


def codec_section(index: int, codec: KVCodec) -> Section:
    """What a layer's codec scales channels by, if anything."""
    tensors = {f"{codec_name(index)}/{role}": weights for role, weights in weights_of(codec).items()}
    forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
    return Section(codec_name(index), forms, lambda: ([tensor] for tensor in tensors.values()))


def index_name(index: int) -> str:
    """Of the section, and of the tensor, of the index of a layer's keys."""
    return f"{INDEX_SECTIONS}{index}"


def index_section(index: int, layer: Any) -> Section | None:
    """The index of a layer's keys, if attention chooses by one."""
    if not isinstance(layer, HybridLayer) or layer.index is None or layer.store is None:
        return None
    if isinstance(layer.store, SplitStore):  # the index of the middle is not that of the whole
        return None
    store, of_keys = layer.store, layer.index
    assert isinstance(store, HostStore | QuantizedStore)
    store.wait_for_copies()
    form = TensorForm(torch.uint8, tuple(of_keys.form(store)))
    if not form.num_bytes:
        return None
    return Section(index_name(index), {index_name(index): form}, lambda: [[of_keys.rows(store)]])


def part_names(section: str, part: str) -> tuple[str, str]:
    """Names of the keys and the values of one part of a store."""
    return f"{section}/{part}.keys", f"{section}/{part}.values"


def forms_of(store: HostStore, num_entries: int) -> tuple[TensorForm, TensorForm]:
    """Keys and values as they are in a file: as a store in host memory keeps them."""
    keys, values = (
        TensorForm(buffer.dtype, tuple(buffer.stored_shape(num_entries))) for buffer in (store.keys, store.values)
    )
    return keys, values


def described_layer(layer: Any) -> LayerDescription:
    """
    Everything about a layer but its tensors.

    Raises:
        ValueError: it is of transformers' own and holds something that cannot be saved.
    """
    name = type(layer).__name__
    if not isinstance(layer, HybridLayer):
        return LayerDescription(name, attributes=attributes_of(layer))
    if layer.store is None:
        return LayerDescription(name)
    if isinstance(layer.store, ShardedStore):
        entries = {name: part.entries for name, part in layer.store.parts().items()}
    else:
        assert isinstance(layer.store, LocalStore)
        entries = {name: part.num_entries for name, part in layer.store.whole_parts().items()}
    return LayerDescription(name, States.of(layer.store.shape, entries))


def section_of(index: int, layer: Any) -> Section:
    """The section of one layer."""
    section = layer_name(index)
    if not isinstance(layer, HybridLayer):
        tensors = {f"{section}/{name}": tensor for name, tensor in tensors_by_name(layer).items()}
        forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
        return Section(section, forms, lambda: ([tensor.cpu()] for tensor in tensors.values()))
    if isinstance(layer.store, ShardedStore):
        return _section_of_shares(section, layer.store)
    assert layer.store is None or isinstance(layer.store, LocalStore)
    parts = {} if layer.store is None else layer.store.whole_parts()
    forms = {}
    for name, part in parts.items():
        form = part.form if isinstance(part.form, HostStore) else HostStore.like(part.form)
        forms |= dict(zip(part_names(section, name), forms_of(form, part.num_entries), strict=True))
    return Section(section, forms, lambda: _rows_of(parts))


def token_section(token_ids: torch.Tensor) -> Section:
    """The section of the token ids that a cache holds the states of, `[batch, tokens]`."""
    tensors = {TOKEN_IDS: token_ids.to("cpu", torch.int32)}
    return Section(TOKEN_IDS, {TOKEN_IDS: TensorForm.of(tensors[TOKEN_IDS])}, lambda: [tensors.values()])


def _section_of_shares(section: str, store: ShardedStore) -> Section:
    """The section of a layer whose blocks are with several processes, which make the pieces together."""
    parts = store.parts()
    forms: dict[str, TensorForm] = {}
    for name, part in parts.items():
        forms |= dict(zip(part_names(section, name), forms_of(part.store, part.entries), strict=True))
    both = [(part, role) for part in parts.values() for role, _ in enumerate(ROLES)]
    return Section(section, forms, lambda: (store.rows_together(part, role) for part, role in both))


def _rows_of(parts: Mapping[str, WholePart]) -> Iterator[Iterable[torch.Tensor]]:
    for part in parts.values():
        store = part.made()
        store.wait_for_copies()
        rows = store
        if not isinstance(rows, HostStore):
            rows = HostStore.like(store)
            rows.take_from(store)
        rows.clear_rest()
        yield from ([states] for states in rows.rows())
