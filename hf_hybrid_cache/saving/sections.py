"""The layers of a cache as sections of a file, whose tensors are made when they are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs import weights_of
from ..layers import HybridLayer
from ..storage import BlockSegment, KVCodec, Part, SeenQueries, ShardedStore, Store
from .container import TensorForm
from .description import TAILS, LayerDescription, States
from .plain_layers import attributes_of, tensors_by_name

TOKEN_IDS = "token_ids"
ROLES = ("keys", "values")
CODEC_SECTIONS = "codecs."
INDEX_SECTIONS = "index."
QUERY_SECTIONS = "queries."

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Section:
    """
    Tensors that share a checksum.

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
    """Return the name of the section with a layer's channel scaling."""
    return f"{CODEC_SECTIONS}{index}"


def codec_section(index: int, codec: KVCodec) -> Section:
    """Return the section with the channel scaling of a layer's codec, if there is any."""
    tensors = {f"{codec_name(index)}/{role}": weights for role, weights in weights_of(codec).items()}
    forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
    return Section(codec_name(index), forms, lambda: ([tensor] for tensor in tensors.values()))


def queries_name(index: int) -> str:
    """Return the name of the section with the queries by which a layer's codec is to be chosen."""
    return f"{QUERY_SECTIONS}{index}"


def forms_of_queries(index: int, num_kv_heads: int, key_dim: int) -> dict[str, TensorForm]:
    """Return the forms of the tensors of that section, by name."""
    name = queries_name(index)
    squares = TensorForm(torch.float32, (num_kv_heads, key_dim))
    return {f"{name}/squares": squares, f"{name}/number": TensorForm(torch.int64, (1,))}


def tensors_of_queries(index: int, seen: SeenQueries) -> dict[str, torch.Tensor]:
    """Return the tensors of that section, by name."""
    name = queries_name(index)
    return {f"{name}/squares": seen.squares.cpu(), f"{name}/number": torch.tensor([seen.number])}


def queries_of(index: int, tensors: Tensors) -> SeenQueries:
    """
    Return the queries of that section.

    Raises:
        ValueError: these are none.
    """
    name = queries_name(index)
    squares, number = tensors.get(f"{name}/squares"), tensors.get(f"{name}/number")
    if squares is None or number is None or int(number) < 1 or not bool((squares.isfinite() & (squares >= 0)).all()):
        raise ValueError(f"there are no means of squares of queries for layer {index}")
    return SeenQueries(squares, int(number))


def queries_section(index: int, seen: SeenQueries) -> Section:
    """Return the section with the queries by which a layer's codec is to be chosen."""
    tensors = tensors_of_queries(index, seen)
    forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
    return Section(queries_name(index), forms, lambda: ([tensor] for tensor in tensors.values()))


def index_name(index: int) -> str:
    """Return the name of the section and the tensor with a layer's key index."""
    return f"{INDEX_SECTIONS}{index}"


def index_section(index: int, layer: Any) -> Section | None:
    """Return the section with a layer's key index, if it has one."""
    if not isinstance(layer, HybridLayer) or layer.index is None:
        return None
    if layer.store is None or layer.store.indexed.on_device is not None:  # that of the middle is not that of the whole
        return None
    store, of_keys = layer.store.indexed, layer.index
    store.wait_for_copies()
    form = TensorForm(torch.uint8, tuple(of_keys.form(store)))
    if not form.num_bytes:
        return None
    return Section(index_name(index), {index_name(index): form}, lambda: [[of_keys.rows(store)]])


def part_names(section: str, part: str) -> tuple[str, str]:
    """Return the names of the keys and the values of one part of a store."""
    return f"{section}/{part}.keys", f"{section}/{part}.values"


def forms_of(segment: BlockSegment, num_entries: int) -> tuple[TensorForm, TensorForm]:
    """Return the dtypes and shapes of keys and values in a file, as a segment in host memory has them."""
    keys, values = (
        TensorForm(buffer.dtype, tuple(buffer.stored_shape(num_entries))) for buffer in (segment.keys, segment.values)
    )
    return keys, values


def described_layer(layer: Any) -> LayerDescription:
    """
    Describe a layer without its tensors.

    Raises:
        ValueError: it is of transformers' own and holds something that cannot be saved.
    """
    name = type(layer).__name__
    if not isinstance(layer, HybridLayer):
        return LayerDescription(name, attributes=attributes_of(layer))
    if layer.store is None:
        return LayerDescription(name)
    store = layer.store
    if isinstance(store, ShardedStore):
        entries = {name: part.entries for name, part in store.shared_parts().items()}
    else:
        entries = {name: part.num_entries for name, part in _parts_of(store).items()}
    prefixes = store.prefix.shape.batch if store.is_continued else None
    return LayerDescription(name, States.of(store.shape, entries, prefixes))


def section_of(index: int, layer: Any) -> Section:
    """Return the section of one layer."""
    section = layer_name(index)
    if not isinstance(layer, HybridLayer):
        tensors = {f"{section}/{name}": tensor for name, tensor in tensors_by_name(layer).items()}
        forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
        return Section(section, forms, lambda: ([tensor.cpu()] for tensor in tensors.values()))
    if isinstance(layer.store, ShardedStore):
        return _section_of_shares(section, layer.store)
    parts = {} if layer.store is None else _parts_of(layer.store)
    forms = {}
    for name, part in parts.items():
        form = part.form if isinstance(part.form, BlockSegment) else BlockSegment.like(part.form)
        forms |= dict(zip(part_names(section, name), forms_of(form, part.num_entries), strict=True))
    return Section(section, forms, lambda: _rows_of(parts))


def _parts_of(store: Store) -> dict[str, Part]:
    """The parts of a store that one process has, by their names in a file."""
    if not store.is_continued:
        return store.parts()
    return store.prefix.parts() | {f"{TAILS}{name}": part for name, part in store.tails.parts().items()}


def token_section(token_ids: torch.Tensor) -> Section:
    """Return the section of the token ids of the stored states, `[batch, tokens]`."""
    tensors = {TOKEN_IDS: token_ids.to("cpu", torch.int32)}
    return Section(TOKEN_IDS, {TOKEN_IDS: TensorForm.of(tensors[TOKEN_IDS])}, lambda: [tensors.values()])


def _section_of_shares(section: str, store: ShardedStore) -> Section:
    """Return the section of a layer whose blocks several processes keep, which make the pieces together."""
    parts = store.shared_parts()
    forms: dict[str, TensorForm] = {}
    for name, part in parts.items():
        forms |= dict(zip(part_names(section, name), forms_of(part.segment, part.entries), strict=True))
    both = [(part, role) for part in parts.values() for role, _ in enumerate(ROLES)]
    return Section(section, forms, lambda: (store.rows_together(part, role) for part, role in both))


def _rows_of(parts: Mapping[str, Part]) -> Iterator[Iterable[torch.Tensor]]:
    for part in parts.values():
        segment = part.in_host_memory()
        segment.wait_for_copies()
        segment.clear_rest()
        yield from ([states] for states in segment.rows())
