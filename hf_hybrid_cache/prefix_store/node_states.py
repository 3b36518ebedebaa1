"""
The states of a node: from a cache into sections of its file, and from the files of a prompt into an empty cache.

A node has what is new since it began, and the end of the cache as it is.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..cache import Contents
from ..codecs import describe
from ..files.description import DTYPES, SavedLayers, States
from ..files.filling import Filling, Targets, read_codecs
from ..files.layers import codec_section, described_layer, layer_section, role_names, rows_section
from ..files.tensor_file import Section, TensorFile, TensorForm
from ..layers import HybridLayer, LayerStores, stock_form
from ..scalars import as_count
from ..storage import GRANULE, OneSequence, SharedPrefix
from .folder import Match
from .node_files import Node

# Two readers: one sums up while the other one copies.
_READERS = 2


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
    layers = [stock_form(layer) for layer in layers]
    for index, layer in enumerate(layers):
        if not isinstance(layer, HybridLayer) or layer.store is None:
            sections.append(layer_section(index, layer))
            continue
        assert not isinstance(layer.store, SharedPrefix)
        firsts = _first_entries(layer.store, start, _entries(before, index))
        sections.append(rows_section(index, layer.store, firsts))
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
        states.batch == 1
        and min(states.num_kv_heads, states.key_dim, states.value_dim) > 0
        and all(DTYPES[dtype].is_floating_point for dtype in (states.key_dtype, states.value_dtype))
        and states.entries.keys() in ({"states"}, {"full", "packed"})
    )


def fill(contents: Contents, match: Match) -> NodeStates:
    """
    Put the states of nodes into the empty layers of a cache, and return what the last one says of them.

    A file that is damaged raises `CacheFileError`, and nodes that do not fit the layers, or each other, `ValueError`;
    the layers hold anything then.
    """
    files, states = list[TensorFile](), list[NodeStates]()
    for node in match.nodes:
        file, head = node.open()
        with file:  # the headers of all, and few open files
            files.append(file)
            states.append(NodeStates.from_json(head.states))
            if states[-1].codecs:
                _take_codecs(file, states[-1], contents.stores)
    if len(states[-1].layers) != len(contents.layers):
        raise ValueError(f"there are {len(states[-1].layers)} layers there and {len(contents.layers)} here")
    filling = _Nodes(files, states)
    takes = [filling.place(index, layer) for index, layer in enumerate(contents.layers)]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(_read, match.nodes, filling.of_nodes))
    for take in takes:
        take()
    if contents.num_tokens != match.num_tokens:
        raise ValueError(f"they are states of {contents.num_tokens:,} tokens")
    return states[-1]


class _Nodes(Filling):
    """Fills layers from several nodes, of which each has some of the rows, and the last one describes the layers."""

    are_shards = True

    def __init__(self, files: Sequence[TensorFile], states: Sequence[NodeStates]):
        super().__init__(files[-1], states[-1])
        self.of_nodes: list[Targets] = [*({} for _ in files[:-1]), self.targets]
        self._nodes = list(zip(files, (each.first_rows for each in states), self.of_nodes, strict=True))

    def shares(self, index: int, part: str, name: str, form: TensorForm) -> list[tuple[Targets, slice]]:
        """
        Return which node fills which rows, from the first one to those of the next node.

        Both ends of a quantized layer come from the last node, the sinks from the last one that begins with them.
        """
        found = [(file.tensors(f"layers.{index}").get(name), rows, into) for file, rows, into in self._nodes]
        given = [(tensor.form, rows.get(name, 0), into) for tensor, rows, into in found if tensor is not None]
        if part == "full":
            sinks = max((at for at, (_, first, _) in enumerate(given) if not first), default=0)
            given = [each for at, each in enumerate(given) if at in (sinks, len(given) - 1)]
        borders = [*(first for _, first, _ in given), form.shape[0]]
        if borders[0] or any(stop < start for start, stop in pairwise(borders)):
            raise ValueError(f"the rows of {name} do not follow each other")
        shares = []
        for (there, start, into), stop in zip(given, borders[1:], strict=True):
            if (there.dtype, there.shape[1:]) != (form.dtype, form.shape[1:]) or there.shape[0] < stop - start:
                raise ValueError(f"{name} has {list(there.shape)} of {there.dtype} instead of {list(form.shape)}")
            shares.append((into, slice(start, stop)))
        return shares


def _take_codecs(file: TensorFile, states: NodeStates, stores: LayerStores) -> None:
    """Take the codecs that a node was written with, and the queries that they are to be chosen by."""
    codecs, queries = read_codecs(file, states)
    asked = stores.asked_codecs
    for index, codec in codecs.items():
        if index not in asked or codec.sink_tokens != asked[index].sink_tokens:
            raise ValueError(f"the codec of layer {index} is not what was asked for")
    stores.take_codecs(codecs)
    stores.take_seen_queries(queries)


def _read(node: Node, targets: Mapping) -> None:
    """Read all of a node, what is wanted into `targets`, and compare it with its checksums."""
    file, _ = node.open()
    with file:
        for section in file.sections:
            file.read(section, targets)
