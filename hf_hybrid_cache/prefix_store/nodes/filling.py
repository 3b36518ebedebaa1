"""Filling an empty cache from the nodes of a prompt."""

import zlib
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import torch

from ...cache import Contents
from ...layers import HybridLayer, LayerStores
from ...prefix_folder import NodeFile, NodeFileError
from ...saving.container import TensorForm
from ...saving.description import LayerDescription, States
from ...saving.devices import Devices
from ...saving.plain_layers import restore
from ...saving.sections import ROLES, forms_of
from ...saving.writing import bytes_of
from ...storage import BlockSegment, LayerStore, Segment, ShardedStore, require_host_bytes
from .states import NodeStates

# Two readers: one sums up while the other one copies.
_READERS = 2
_PIECE_BYTES = 2**19


class StoredPart(NamedTuple):
    """
    A node on the way to a prompt's last stored token.

    Attributes:
        file: of the node.
        states: that it has.
        end: number of tokens up to its end, or up to the last one that is used of the last node.
    """

    file: NodeFile
    states: NodeStates
    end: int


def fill(contents: Contents, parts: Sequence[StoredPart]) -> None:
    """
    Put the states of nodes into the empty layers of a cache.

    Args:
        contents: of the cache.
        parts: in order. Of the last one a beginning is enough where all layers are in full precision.

    Raises:
        NodeFileError: a file is damaged; the layers hold anything then.
        ValueError: the nodes do not fit the layers, or each other; likewise.
        HostMemoryError: host memory would not suffice.
    """
    last, stores, devices = parts[-1], contents.stores, Devices(None)
    targets: list[dict[str, memoryview]] = [{} for _ in parts]
    for part in parts:
        if part.states.codecs:
            _take_codecs(part, stores)
    filled: list[tuple[HybridLayer, dict[str, Segment]]] = []
    restored: list[tuple[int, LayerDescription, dict[str, torch.Tensor]]] = []
    for index, (layer, described) in enumerate(zip(contents.layers, last.states.layers, strict=True)):
        if described.type != type(layer).__name__:
            raise ValueError(f"layer {index} is a {described.type} there and a {type(layer).__name__} here")
        if not isinstance(layer, HybridLayer):
            own = {each.name for each in last.states.sections if each.name.startswith(f"{index}/")}
            tensors = _empty_tensors(last, own)
            targets[-1] |= {name: bytes_of(each) for name, each in tensors.items()}
            restored.append((index, described, tensors))
        elif described.states is not None:
            filled.append((layer, _place_rows(index, layer, described.states, parts, targets, devices)))
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(_read_node, parts, targets))
    for layer, segments in filled:
        assert isinstance(layer.store, LayerStore)
        if not isinstance(layer.store, ShardedStore):
            layer.store.take_parts(segments)
    for index, described, tensors in restored:
        _restore(index, contents.layers[index], described.attributes or {}, tensors, devices)
    if contents.num_tokens != last.end:
        raise ValueError(f"they are states of {contents.num_tokens:,} tokens")


def _take_codecs(part: StoredPart, stores: LayerStores) -> None:
    """Take the codecs that a node was written with, and the queries that they are to be chosen by."""
    names, asked = part.states.choice_forms(), stores.asked_codecs
    tensors = _empty_tensors(part, names)
    _read_node(part, {name: bytes_of(each) for name, each in tensors.items()})
    codecs = part.states.chosen_codecs(tensors)
    for index, codec in codecs.items():
        if index not in asked or codec.sink_tokens != asked[index].sink_tokens:
            raise ValueError(f"the codec of layer {index} is not what was asked for")
    stores.take_codecs(codecs)
    stores.take_seen_queries(part.states.seen_queries(tensors))


def _restore(
    index: int, layer: Any, attributes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], devices: Devices
) -> None:
    """Give a layer of transformers' own, which is new, its states; what it knows by its config stays as it is."""
    by_name = {name.partition("/")[2]: each for name, each in tensors.items()}
    for name, value in vars(layer).items():
        if type(value) in (bool, int, float, str):
            given = attributes.get(name, value)
            if type(given) is not type(value) or (value and given != value):
                raise ValueError(f"layer {index} has {name} {given!r} there and {value!r} here")
    try:
        restore(layer, attributes, by_name, devices)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"layer {index} cannot be restored ({type(error).__name__}: {error})") from error


def _place_rows(
    index: int,
    layer: HybridLayer,
    states: States,
    parts: Sequence[StoredPart],
    targets: Sequence[dict[str, memoryview]],
    devices: Devices,
) -> dict[str, Segment]:
    """Make the segments of a layer, and say which rows of them come from which node."""
    store = layer.start(states.shape_on(devices))
    entries = dict(states.entries)
    if "states" in entries:
        entries["states"] = parts[-1].end
    if entries.keys() != store.parts().keys():
        raise ValueError(f"layer {index} has {', '.join(entries)} instead of {', '.join(store.parts())}")
    if entries.get("packed") and (store.wants_queries or entries["full"] < store.layout.sink_tokens):
        raise ValueError(f"layer {index} has {entries['packed']:,} quantized blocks after {entries['full']:,} tokens")
    filled: dict[str, Segment] = {}
    is_shared_out = isinstance(store, ShardedStore)
    if isinstance(store, ShardedStore):
        store.expect(entries)
    for name, part in store.parts().items():
        host = part.own_segment or BlockSegment.like(part.form, entries[name])
        names = [f"{index}/{name}.{role}" for role in ROLES]
        # Shapes are compared before memory is taken.
        forms = forms_of(host, host.num_tokens if is_shared_out else entries[name])
        shares = [_shares(*each, name == "full", parts) for each in zip(names, forms, strict=True)]
        if not is_shared_out:
            host.make_rows(entries[name])
        filled[name] = host
        for tensor, rows, of_nodes in zip(names, host.rows(), shares, strict=True):
            for node, start, stop in of_nodes:
                targets[node][tensor] = bytes_of(rows[start:stop])
    return filled


def _shares(name: str, form: TensorForm, is_ends: bool, parts: Sequence[StoredPart]) -> list[tuple[int, int, int]]:
    """
    Return which node fills which rows, from the first one to those of the next node: its number, and their range.

    Both ends of a quantized layer come from the last node, the sinks from the last one that begins with them.
    """
    found = [next((each for each in part.states.sections if each.name == name), None) for part in parts]
    givers = [(node, each) for node, each in enumerate(found) if each is not None]
    if is_ends:
        sinks = max((at for at, (_, each) in enumerate(givers) if not each.first_row), default=0)
        givers = [giver for at, giver in enumerate(givers) if at in (sinks, len(givers) - 1)]
    starts = [each.first_row for _, each in givers] + [form.shape[0]]
    if starts[0] != 0 or any(stop - start < 0 for start, stop in pairwise(starts)):
        raise ValueError(f"the rows of {name} do not follow each other")
    for (_, section), (start, stop) in zip(givers, pairwise(starts), strict=True):
        expected = (*section.form.shape[:1], *form.shape[1:])
        if section.form != TensorForm(form.dtype, expected) or section.form.shape[0] < stop - start:
            raise ValueError(f"{name} has rows of {list(section.form.shape)} instead of {list(form.shape)}")
    return [(node, start, stop) for (node, _), (start, stop) in zip(givers, pairwise(starts), strict=True)]


def _empty_tensors(part: StoredPart, names: Container[str]) -> dict[str, torch.Tensor]:
    """Make empty tensors for the sections of a node with these names."""
    wanted = [section for section in part.states.sections if section.name in names]
    require_host_bytes(sum(section.form.num_bytes for section in wanted), f"States of {part.end:,} tokens need")
    with torch.inference_mode(False):
        return {each.name: torch.empty(each.form.shape, dtype=each.form.dtype) for each in wanted}


def _read_node(part: StoredPart, targets: Mapping[str, memoryview]) -> None:
    """Read all of a node, what is wanted into `targets`, and compare it with its checksum."""
    checksum, scratch = 0, memoryview(bytearray(_PIECE_BYTES))
    try:
        with part.file.open() as file:
            for section in part.states.sections:
                target = targets.get(section.name, memoryview(b""))
                checksum = _read_into(file, target, checksum)
                checksum = _skip(file, section.padded_bytes - len(target), scratch, checksum)
    except OSError as error:
        raise NodeFileError(part.file.path, f"cannot be read: {error.strerror or error}.") from error
    if checksum != part.file.head.payload_checksum:
        raise NodeFileError(part.file.path, "was altered: its payload does not fit its checksum.")


def _read_into(file: BinaryIO, target: memoryview, checksum: int) -> int:
    """Fill memory from a file, and return the checksum continued over it."""
    for start in range(0, len(target), _PIECE_BYTES):
        rest = piece = target[start : start + _PIECE_BYTES]
        while rest:
            count = file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise NodeFileError(file.name, "is cut off: it became shorter while it was read.")
            rest = rest[count:]
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _skip(file: BinaryIO, num_bytes: int, scratch: memoryview, checksum: int) -> int:
    """Read on without keeping it, and return the checksum continued over it."""
    for start in range(0, num_bytes, len(scratch)):
        checksum = _read_into(file, scratch[: min(len(scratch), num_bytes - start)], checksum)
    return checksum
