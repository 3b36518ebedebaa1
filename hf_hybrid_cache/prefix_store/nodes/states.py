"""The states of a range of tokens as the tensors of a node: what is new since the range began, and the end as it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from ...codecs import describe, described_codec, weights_of
from ...layers import HybridLayer, LayerStores
from ...saving.container import TensorForm
from ...saving.description import LayerDescription, States, described_layers
from ...saving.plain_layers import dtype_name, named_dtype, tensors_by_name
from ...saving.sections import QUERY_SECTIONS, ROLES, described_layer, queries_name, queries_of, tensors_of_queries
from ...scalars import as_count
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
            codecs = {as_count(index): dict(each) for index, each in tree["codecs"]}
            return cls(described_layers(tree["layers"]), sections, codecs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"does not describe states ({type(error).__name__}: {error}).") from error

    def require_fit(self, num_tokens: int, payload_bytes: int) -> None:
        """
        Compare all numbers with each other, with the tokens up to the node's end, and with the size of its payload.

        Raises:
            ValueError: they do not fit.
        """
        if self.num_bytes != payload_bytes:
            raise ValueError(f"its tensors have {self.num_bytes:,} bytes, and its payload {payload_bytes:,}.")
        if len({section.name for section in self.sections}) != len(self.sections):
            raise ValueError("two of its tensors have one name.")
        for index, layer in enumerate(self.layers):
            if layer.states is not None and not _are_of(num_tokens, layer.states):
                raise ValueError(f"layer {index} does not have states of {num_tokens:,} tokens ({layer.states}).")
        if any(index >= len(self.layers) for index in self.codecs):
            raise ValueError(f"it has codecs of {list(self.codecs)}, and {len(self.layers)} layers.")
        forms = self.choice_forms()
        are_empty = [layer.states is None and layer.attributes is None for layer in self.layers]
        empty = {str(index) for index, is_empty in enumerate(are_empty) if is_empty}
        for section in self.sections:
            if section.name.partition("/")[0] in empty:
                raise ValueError(f"it has {section.name} of an empty layer.")
            if section.form not in forms.get(section.name, (section.form,)):
                raise ValueError(f"{section.name} has the shape {list(section.form.shape)}.")

    def choice_forms(self) -> dict[str, tuple[TensorForm, ...]]:
        """Return the forms that sections with what codecs were, or are to be, chosen by may have, by their names."""
        forms: dict[str, tuple[TensorForm, ...]] = {}
        for index in self.codecs:
            states = self.layers[index].states
            if states is None:  # a layer that the model does not use
                continue
            heads, dims = states.num_kv_heads, (states.key_dim, states.value_dim)
            for role, dim in zip(ROLES, dims, strict=True):
                shapes = (heads, dim), (heads, dim, dim)
                forms[f"codecs.{index}/{role}"] = (*(TensorForm(torch.float32, shape) for shape in shapes),)
            forms[f"queries.{index}/squares"] = (TensorForm(torch.float32, (heads, dims[0])),)
            forms[f"queries.{index}/number"] = (TensorForm(torch.int64, (1,)),)
        return forms

    def chosen_codecs(self, weights: Mapping[str, torch.Tensor]) -> dict[int, KVCodec]:
        """
        Make the codecs, with their weights by the names of sections.

        Raises:
            ValueError: these are none.
        """
        made = {}
        for index, tree in self.codecs.items():
            of_layer = {role: weights[name] for role in ROLES if (name := f"codecs.{index}/{role}") in weights}
            try:
                made[index] = described_codec(tree, of_layer)
            except (TypeError, ImportError) as error:
                raise ValueError(f"there is no codec for layer {index} ({error})") from error
        return made

    def seen_queries(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, SeenQueries]:
        """
        Return the queries by which codecs are still to be chosen, with their tensors by the names of sections.

        Raises:
            ValueError: these are none.
        """
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


def _are_of(num_tokens: int, states: States) -> bool:
    """Whether states are numbers of one sequence of so many tokens, by what they say of themselves."""
    entries, dtypes = states.entries, (named_dtype(states.key_dtype), named_dtype(states.value_dtype))
    counts = {"states": entries.get("states", 0)}, {"full": entries.get("full", 0), "packed": entries.get("packed", 0)}
    return (
        (states.batch, states.prefixes) == (1, 1)
        and min(states.num_kv_heads, states.key_dim, states.value_dim) > 0
        and all(dtype.is_floating_point for dtype in dtypes)
        and entries in counts
        and sum(GRANULE * number if name == "packed" else number for name, number in entries.items()) == num_tokens
    )


def _section(name: Any, dtype: Any, shape: Any, first_row: Any) -> Section:
    if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name!r} is no tensor")
    return Section(name, TensorForm(named_dtype(dtype), tuple(map(as_count, shape))), as_count(first_row))
