"""Filling an empty cache from the nodes of a prompt."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from ..cache import Contents
from ..files.filling import Filling, Targets, read_codecs
from ..files.tensor_file import TensorFile, TensorForm
from ..layers import LayerStores
from .folder import Part
from .states import NodeStates

# Two readers: one sums up while the other one copies.
_READERS = 2


def fill(contents: Contents, parts: Sequence[Part]) -> NodeStates:
    """
    Put the states of nodes into the empty layers of a cache, and return what the last one says of them.

    A file that is damaged raises `CacheFileError`, and nodes that do not fit the layers, or each other, `ValueError`;
    the layers hold anything then.
    """
    end, files, states = parts[-1].node.end, list[TensorFile](), list[NodeStates]()
    for part in parts:
        with part.open() as file:  # the headers of all, and few open files
            files.append(file)
            states.append(states_of(file))
            if states[-1].codecs:
                _take_codecs(file, states[-1], contents.stores)
    if len(states[-1].layers) != len(contents.layers):
        raise ValueError(f"there are {len(states[-1].layers)} layers there and {len(contents.layers)} here")
    filling = _Nodes(files, states)
    takes = [filling.place(index, layer) for index, layer in enumerate(contents.layers)]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(_read, parts, filling.of_nodes))
    for take in takes:
        take()
    if contents.num_tokens != end:
        raise ValueError(f"they are states of {contents.num_tokens:,} tokens")
    return states[-1]


def states_of(file: TensorFile) -> NodeStates:
    """Return what a node says of its states; raise `ValueError` if it says something else."""
    return NodeStates.from_json(file.metadata.get("states", ""))


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


def _read(part: Part, targets: Mapping) -> None:
    """Read all of a node, what is wanted into `targets`, and compare it with its checksums."""
    with part.open() as file:
        for section in file.sections:
            file.read(section, targets)
