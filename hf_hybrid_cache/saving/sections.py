"""A cache's layers as sections of a file: which tensors there are, and the tensors themselves when they are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs import weights_of
from ..layers import HybridLayer
from ..storage import BufferedStore, CodedStore, HostStore, KVCodec, KVStore
from .container import TensorForm
from .description import LayerDescription, States
from .plain_layers import attributes_of, tensors_by_name

TOKEN_IDS = "token_ids"
ROLES = ("keys", "values")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Section:
    """
    Tensors that have a checksum in common.

    Attributes:
        name: of the section.
        forms: of the tensors, by name.
        pieces: makes the tensors, in host memory and in the order of `forms`, some at a time.
    """

    name: str
    forms: Mapping[str, TensorForm]
    pieces: Callable[[], Iterable[Tensors]]


def layer_name(index: int) -> str:
    return f"layers.{index}"


def codec_name(index: int) -> str:
    """Of the section of what the codec of a layer was chosen to be."""
    return f"codecs.{index}"


def codec_section(index: int, codec: KVCodec) -> Section:
    """What a layer's codec balances channels by, if anything."""
    tensors = {f"{codec_name(index)}/{role}": weights for role, weights in weights_of(codec).items()}
    forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
    return Section(codec_name(index), forms, lambda: [tensors])


def part_names(section: str, part: str) -> tuple[str, str]:
    """Names of the keys and the values of one part of a store."""
    return f"{section}/{part}.keys", f"{section}/{part}.values"


def parts_of(store: KVStore) -> dict[str, BufferedStore]:
    """What a store is made of: buffers that are kept one by one."""
    if isinstance(store, CodedStore):
        store.take_held()
        return {"full": store.full, "records": store.records}
    assert isinstance(store, BufferedStore)
    return {"states": store}


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
    entries = {part: store.num_tokens for part, store in parts_of(layer.store).items()}
    return LayerDescription(name, States.of(layer.store.shape, entries))


def section_of(index: int, layer: Any) -> Section:
    """The section of one layer."""
    section = layer_name(index)
    if not isinstance(layer, HybridLayer):
        tensors = {f"{section}/{name}": tensor for name, tensor in tensors_by_name(layer).items()}
        forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
        return Section(section, forms, lambda: ({name: tensor.cpu()} for name, tensor in tensors.items()))
    parts = {} if layer.store is None else parts_of(layer.store)
    forms = {}
    for part, store in parts.items():
        form = store if isinstance(store, HostStore) else HostStore.like(store)
        forms |= dict(zip(part_names(section, part), forms_of(form, store.num_tokens), strict=True))
    return Section(section, forms, lambda: _rows_of(section, parts))


def token_section(token_ids: torch.Tensor) -> Section:
    """The section of the token ids that a cache holds the states of, `[batch, tokens]`."""
    tensors = {TOKEN_IDS: token_ids.to("cpu", torch.int32)}
    return Section(TOKEN_IDS, {TOKEN_IDS: TensorForm.of(tensors[TOKEN_IDS])}, lambda: [tensors])


def _rows_of(section: str, parts: Mapping[str, BufferedStore]) -> Iterator[Tensors]:
    for part, store in parts.items():
        store.wait_for_copies()
        rows = store
        if not isinstance(rows, HostStore):
            rows = HostStore.like(store)
            rows.take_from(store)
        rows.clear_rest()
        yield dict(zip(part_names(section, part), rows.rows(), strict=True))
