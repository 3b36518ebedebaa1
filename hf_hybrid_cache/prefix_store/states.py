"""The states of a range of tokens as sections of a node: what is new since the range began, and the end as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codecs import describe
from ..files.description import DTYPES, SavedLayers, States
from ..files.layers import codec_section, described_layer, layer_section, role_names, rows_section
from ..files.tensor_file import Section
from ..layers import HybridLayer, LayerStores
from ..scalars import as_count
from ..storage import GRANULE, OneSequence, SharedPrefix


@dataclass(frozen=True)
class NodeStates(SavedLayers):
    """
    The description of a node's tensors.

    Its layers are as they are at the end of the node, all of one sequence. Its codecs are not those of layers that had
    quantized blocks before the node.

    Attributes:
        first_rows: where the rows of a tensor come in those of the whole part, by its name; 0 where it is not named.
    """

    first_rows: dict[str, int]

    def __post_init__(self) -> None:
        for row in self.first_rows.values():
            as_count(row)
        for index, states in self._held.items():
            if not _is_of_a_prompt(states) or states.num_tokens != self.num_tokens:
                raise ValueError(f"layer {index} does not have states of {self.num_tokens:,} tokens ({states})")

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of the node; 0 if no layer tells."""
        return next((states.num_tokens for states in self._held.values()), 0)

    @property
    def _held(self) -> dict[int, States]:
        return {index: layer.states for index, layer in enumerate(self.layers) if layer.states is not None}


def states_since(
    start: int, before: NodeStates | None, layers: Sequence[Any], stores: LayerStores
) -> tuple[NodeStates, list[Section]]:
    """
    Return the states of the tokens from `start` on, a block border, with which those before it make the cache as it is.

    Of a layer in full precision these are the blocks from `start` on; of a quantized one its blocks that were
    quantized since, and the tokens in full precision at the end; of a layer of transformers' own all that it holds.
    Where several processes share the cache they are those of the own shard.

    `before` is the node that ends there, or in the block after it. The bytes of sections are made when they are
    written. A layer of transformers' own, or a codec, that cannot be described raises `ValueError`.
    """
    codecs, sections, first_rows = {}, list[Section](), dict[str, int]()
    for index, codec in stores.codecs.items():
        if not _entries(before, index).get("packed"):
            codecs[index] = describe(codec)
            sections.append(codec_section(index, stores))
    for index, layer in enumerate(layers):
        if not isinstance(layer, HybridLayer) or layer.store is None:
            sections.append(layer_section(index, layer))
            continue
        assert not isinstance(layer.store, SharedPrefix)
        firsts = _first_entries(layer.store, start, _entries(before, index))
        sections.append(rows_section(index, {"": layer.store}, firsts))
        for part, first in firsts.items():
            row = first if part == "packed" else first // GRANULE
            first_rows |= dict.fromkeys(role_names(index, part), row)
    described = tuple(described_layer(layer) for layer in layers)
    return NodeStates(described, codecs, first_rows), [section for section in sections if section.forms]


def _first_entries(store: OneSequence, start: int, before: Mapping[str, int]) -> dict[str, int]:
    """Return the first entries of a layer's parts beyond those of its first tokens, by the names of parts."""
    layout, shard, entries = store.layout, store.layout.shard, store.entries()
    if store.codec is None:
        return {"states": shard.tokens(start)}
    packed = replace(layout, quantized_blocks=before.get("packed", 0)).own_quantized_blocks
    # Before anything is quantized sinks may be incomplete.
    full = min(shard.tokens(layout.sink_tokens), entries["full"]) if before.get("packed") else 0
    return {"packed": min(packed, entries["packed"]), "full": full}


def _entries(node: NodeStates | None, index: int) -> Mapping[str, int]:
    """Return how many entries there are in each part of a layer at the end of a node."""
    states = None if node is None else node.layers[index].states
    return {} if states is None else states.entries


def _is_of_a_prompt(states: States) -> bool:
    """Whether states are numbers of one sequence, by what they say of themselves."""
    return (
        (states.batch, states.prefixes) == (1, 1)
        and min(states.num_kv_heads, states.key_dim, states.value_dim) > 0
        and all(DTYPES[dtype].is_floating_point for dtype in (states.key_dtype, states.value_dtype))
        and states.entries.keys() in ({"states"}, {"full", "packed"})
    )
