"""The states of a range of tokens as the tensors of a node: what is new since the range began, and the end as it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from ...codecs import describe, described_codec, weights_of
from ...layers import HybridLayer, LayerStores
from ...saving.container import TensorForm
from ...saving.description import LayerDescription, described_layers
from ...saving.plain_layers import dtype_name, named_dtype, tensors_by_name
from ...saving.sections import QUERY_SECTIONS, ROLES, described_layer, queries_name, queries_of, tensors_of_queries
from ...storage import GRANULE, KVCodec, LayerStore, SeenQueries

ALIGNMENT = 64
_MOST_DIMENSIONS = 16


class Section(NamedTuple):
    """
    A tensor of a node.

    Attributes:
        name: "LAYER/PART.keys" or "LAYER/PART.values" of a layer of ours, "LAYER/NAME" of another one,
            "codecs.LAYER/ROLE" of a codec, "queries.LAYER/NAME" of what one is to be chosen by.
        form: its dtype and shape.
        first_row: where its rows come in those of the whole part.
    """

    name: str
    form: TensorForm
    first_row: int = 0

    @property
    def padded_bytes(self) -> int:
        return self.form.num_bytes + -self.form.num_bytes % ALIGNMENT


@dataclass(frozen=True)
class NodeStates:
    """
    The description of a node's tensors.

    Attributes:
        layers: all of the cache, as they are at the end of the node.
        sections: in the order of the payload.
        codecs: of quantized layers, by index; not of those that had quantized blocks before the node.
    """

    layers: tuple[LayerDescription, ...]
    sections: tuple[Section, ...]
    codecs: Mapping[int, Mapping[str, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(section.padded_bytes for section in self.sections)

    def to_tree(self) -> dict[str, Any]:
        """Return the description for JSON."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "sections": [
                [section.name, dtype_name(section.form.dtype), list(section.form.shape), section.first_row]
                for section in self.sections
            ],
            "codecs": [[index, tree] for index, tree in self.codecs.items()],
        }

    @classmethod
    def from_tree(cls, tree: Any) -> "NodeStates":
        """
        Read what `to_tree` returned.

        Raises:
            ValueError: it is something else.
        """
        try:
            sections = tuple(_section(*each) for each in tree["sections"])
            codecs = {int(index): dict(each) for index, each in tree["codecs"]}
            return cls(described_layers(tree["layers"]), sections, codecs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"does not describe states ({type(error).__name__}: {error}).") from error

    def chosen_codecs(self, weights: Mapping[str, torch.Tensor]) -> dict[int, KVCodec]:
        """Make the codecs, with their weights by the names of sections."""
        made = {}
        for index, tree in self.codecs.items():
            prefix = f"codecs.{index}/"
            of_layer = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            made[index] = described_codec(tree, of_layer)
        return made

    def seen_queries(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, SeenQueries]:
        """Return the queries by which codecs are still to be chosen, with their tensors by the names of sections."""
        found = {name.partition("/")[0] for name in tensors if name.startswith(QUERY_SECTIONS)}
        return {index: queries_of(index, tensors) for index in self.codecs if queries_name(index) in found}


def states_since(
    start: int, before: NodeStates | None, layers: Sequence[Any], stores: LayerStores
) -> tuple[NodeStates, Iterator[torch.Tensor]]:
    """
    Return the states of the tokens from `start` on, which with those before it make the cache as it is now.

    Of a layer in full precision these are the blocks from `start` on; of a quantized one its blocks that were
    quantized since, and the tokens in full precision at the end; of a layer of transformers' own all that it holds.
    Where several processes share the cache they are those of the own shard.

    Args:
        start: number of tokens before it, whole blocks.
        before: the node that ends there, or in the block after it; `None` for the first one.
        layers: all of the cache, of one sequence.
        stores: of the layers.

    Returns:
        the description, and the tensors in the order of its sections, in host memory.

    Raises:
        ValueError: a layer of transformers' own, or a codec, cannot be described.
    """
    described = tuple(described_layer(layer) for layer in layers)
    named: list[tuple[str, int, torch.Tensor]] = []
    codecs = {}
    for index, codec in stores.codecs.items():
        if not _entries(before, index).get("packed"):
            codecs[index] = describe(codec)
            named += [(f"codecs.{index}/{role}", 0, each) for role, each in weights_of(codec).items()]
    for index, seen in stores.seen_queries.items():
        named += [(name, 0, tensor) for name, tensor in tensors_of_queries(index, seen).items()]
    for index, layer in enumerate(layers):
        if not isinstance(layer, HybridLayer):
            named += [(f"{index}/{name}", 0, tensor.detach().cpu()) for name, tensor in tensors_by_name(layer).items()]
        elif layer.store is not None:
            assert isinstance(layer.store, LayerStore)
            for name, first_row, pair in _new_rows(layer.store, start, _entries(before, index)):
                named += [(f"{index}/{name}.{role}", first_row, each) for role, each in zip(ROLES, pair, strict=True)]
    sections = tuple(Section(name, TensorForm.of(each), first_row) for name, first_row, each in named)
    return NodeStates(described, sections, codecs), (each for _, _, each in named)


def _new_rows(
    store: LayerStore, start: int, before: Mapping[str, int]
) -> Iterator[tuple[str, int, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the name, the first row and the rows of keys and values of what a layer has beyond its first tokens."""
    parts = store.parts()
    layout, shard = store.layout, store.layout.shard
    if store.quantized is None:
        yield "states", shard.blocks(start // GRANULE), parts["states"].rows_from(shard.tokens(start))
        return
    blocks, full = parts["packed"].num_entries, parts["full"]
    first = min(replace(layout, quantized_blocks=before.get("packed", 0)).own_quantized_blocks, blocks)
    yield "packed", first, parts["packed"].rows_from(first)
    # Before anything is quantized sinks may be incomplete.
    first = min(shard.tokens(layout.sink_tokens), full.num_entries) if before.get("packed") else 0
    yield "full", first // GRANULE, full.rows_from(first)


def _entries(node: NodeStates | None, index: int) -> Mapping[str, int]:
    """Return how many entries there are in each part of a layer at the end of a node."""
    states = None if node is None else node.layers[index].states
    return {} if states is None else states.entries


def _section(name: Any, dtype: Any, shape: Any, first_row: Any) -> Section:
    if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name!r} is no tensor")
    if any(type(each) is not int or not 0 <= each < 2**40 for each in (*shape, first_row)):
        raise ValueError(f"{name!r} has no shape, or no place")
    return Section(name, TensorForm(named_dtype(dtype), tuple(shape)), first_row)
