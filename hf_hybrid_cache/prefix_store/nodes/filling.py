"""Filling an empty cache from the nodes of a prompt."""

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import torch

from ...layers import HybridLayer, LayerStores
from ...prefix_folder import NodeFile, NodeFileError
from ...saving.description import LayerDescription, States
from ...saving.devices import Devices
from ...saving.plain_layers import restore
from ...saving.sections import ROLES
from ...saving.writing import bytes_of
from ...storage import BlockSegment, LayerStore, Segment, ShardedStore
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


def fill(layers: Sequence[Any], stores: LayerStores, parts: Sequence[StoredPart]) -> None:
    """
    Put the states of nodes into the empty layers of a cache.

    Args:
        layers: all of the cache.
        stores: of the layers.
        parts: in order. Of the last one a beginning is enough where all layers are in full precision.

    Raises:
        NodeFileError: a file is damaged; the layers hold anything then.
        ValueError: the nodes do not fit the layers, or each other; likewise.
        HostMemoryError: host memory would not suffice.
    """
    last, devices = parts[-1], Devices(None)
    targets: list[dict[str, memoryview]] = [{} for _ in parts]
    for part in parts:
        if part.states.codecs:
            tensors = _empty_tensors(part, "codecs.") | _empty_tensors(part, "queries.")
            _read_node(part, {name: bytes_of(each) for name, each in tensors.items()})
            stores.take_codecs(part.states.chosen_codecs(tensors))
            stores.take_seen_queries(part.states.seen_queries(tensors))
    filled: list[tuple[HybridLayer, dict[str, Segment]]] = []
    restored: list[tuple[Any, LayerDescription, dict[str, torch.Tensor]]] = []
    for index, (layer, described) in enumerate(zip(layers, last.states.layers, strict=True)):
        if described.type != type(layer).__name__:
            raise ValueError(f"layer {index} is a {described.type} there and a {type(layer).__name__} here")
        if not isinstance(layer, HybridLayer):
            tensors = _empty_tensors(last, f"{index}/")
            targets[-1] |= {name: bytes_of(each) for name, each in tensors.items()}
            restored.append((layer, described, tensors))
        elif described.states is not None:
            filled.append((layer, _place_rows(index, layer, described.states, parts, targets, devices)))
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(_read_node, parts, targets))
    for layer, segments in filled:
        assert isinstance(layer.store, LayerStore)
        if not isinstance(layer.store, ShardedStore):
            layer.store.take_parts(segments)
    for layer, described, tensors in restored:
        by_name = {name.partition("/")[2]: each for name, each in tensors.items()}
        restore(layer, described.attributes or {}, by_name, devices)


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
    filled: dict[str, Segment] = {}
    if isinstance(store, ShardedStore):
        store.expect(entries)
    for name, part in store.parts().items():
        host = part.own_segment or BlockSegment.like(part.form, entries[name])
        if not isinstance(store, ShardedStore):
            host.make_rows(entries[name])
        filled[name] = host
        for role, rows in zip(ROLES, host.rows(), strict=True):
            _share_out(f"{index}/{name}.{role}", rows, name == "full", parts, targets)
    return filled


def _share_out(
    name: str,
    rows: torch.Tensor,
    is_ends: bool,
    parts: Sequence[StoredPart],
    targets: Sequence[dict[str, memoryview]],
) -> None:
    """
    Let each node fill the rows up to those of the next one.

    Both ends of a quantized layer come from the last node, the sinks from the last one that begins with them.
    """
    found = [next((each for each in part.states.sections if each.name == name), None) for part in parts]
    givers = [(target, each) for target, each in zip(targets, found, strict=True) if each is not None]
    if is_ends:
        sinks = max((at for at, (_, each) in enumerate(givers) if not each.first_row), default=0)
        givers = [giver for at, giver in enumerate(givers) if at in (sinks, len(givers) - 1)]
    starts = [each.first_row for _, each in givers] + [len(rows)]
    if starts[0] != 0 or any(stop - start < 0 for start, stop in pairwise(starts)):
        raise ValueError(f"the rows of {name} do not follow each other")
    for (target, section), (start, stop) in zip(givers, pairwise(starts), strict=True):
        expected = (*section.form.shape[:1], *rows.shape[1:])
        if section.form.dtype != rows.dtype or section.form.shape != expected or section.form.shape[0] < stop - start:
            raise ValueError(f"{name} has rows of {list(section.form.shape)} instead of {list(rows.shape)}")
        target[name] = bytes_of(rows[start:stop])


def _empty_tensors(part: StoredPart, prefix: str) -> dict[str, torch.Tensor]:
    """Make empty tensors for the sections of a node whose names begin so."""
    with torch.inference_mode(False):
        return {
            each.name: torch.empty(each.form.shape, dtype=each.form.dtype)
            for each in part.states.sections
            if each.name.startswith(prefix)
        }


def _read_node(part: StoredPart, targets: Mapping[str, memoryview]) -> None:
    """Read all of a node, what is wanted into `targets`, and compare it with its checksum."""
    checksum, scratch = 0, memoryview(bytearray(_PIECE_BYTES))
    with part.file.open() as file:
        for section in part.states.sections:
            target = targets.get(section.name, memoryview(b""))
            checksum = _read_into(file, target, checksum)
            checksum = _skip(file, section.padded_bytes - len(target), scratch, checksum)
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
