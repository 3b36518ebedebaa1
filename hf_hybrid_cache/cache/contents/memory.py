"""The memory of a cache: what it holds, room for copies of it, and advice where there is none."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...layers import HybridLayer, LayerStores, tensors_of
from ...storage import HostMemoryError, KVShape, available_host_bytes, require_host_bytes
from .advice import advice
from .contents import Contents


@dataclass(frozen=True)
class MemoryReport:
    """
    The size of a cache, measured from its buffers.

    Attributes:
        device_bytes: in the memory of accelerators.
        host_bytes: in host memory.
        num_tokens: tokens of each sequence.
    """

    device_bytes: int
    host_bytes: int
    num_tokens: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes held for each token of each sequence's context, wherever they are; 0 for an empty cache."""
        return (self.device_bytes + self.host_bytes) / self.num_tokens if self.num_tokens else 0.0


def measured(contents: Contents) -> MemoryReport:
    """Measure the bytes that a cache holds, layers of transformers' own and checkpoints included."""
    sizes = {"host": 0, "device": 0}
    kept = ((tensor.device, tensor.nbytes) for tensor in contents.checkpoints.tensors())
    for device, num_bytes in (*_buffers(contents.stores, contents.layers), *kept):
        sizes["host" if device.type == "cpu" else "device"] += num_bytes
    return MemoryReport(sizes["device"], sizes["host"], contents.num_tokens)


def require_room_for_copies(contents: Contents, number: int, purpose: str, are_shared: bool = False) -> None:
    """
    Raise `HostMemoryError` unless what is held fits `number` times, and one buffer once more while it is exchanged.

    With `are_shared` layers need none for what copies share. The message begins with `purpose`.
    """
    sharing = [layer for layer in contents.ours if are_shared and layer.shares_copies]
    buffers = _buffers(contents.stores, [layer for layer in contents.layers if layer not in sharing])
    sizes = [num_bytes for device, num_bytes in buffers if device.type == "cpu"]
    try:
        require_host_bytes((number - 1) * sum(sizes) + max(sizes, default=0), purpose)
    except HostMemoryError as error:
        raise advised(error, contents, contents.num_tokens, batch=number * _a_shape(contents).batch) from None


def advised(
    error: HostMemoryError, contents: Contents, num_tokens: int, shape: KVShape | None = None, **changes: Any
) -> HostMemoryError:
    """
    Return the error with advice on caches that would fit `num_tokens`.

    `shape` is that of the states of layers that hold none yet, or `None` for that of another layer. `changes` of the
    shapes made them too much.
    """
    stores = contents.stores
    if stores.peers is not None:
        return HostMemoryError(
            f"{error} These are of one of {stores.peers.size} shares: more processes, or fewer bits, make it smaller."
        )
    shape = shape or _a_shape(contents)
    shapes = {
        layer.layer_idx: (shape if layer.store is None else layer.store.shape)._replace(**changes)
        for layer in contents.ours
    }
    placement = replace(stores.placement, cpu_decode=False) if stores.attention.is_declined else stores.placement
    held = 0 if changes else min(layer.get_seq_length() for layer in contents.ours)
    host_bytes = available_host_bytes() + measured(contents).host_bytes
    return HostMemoryError(f"{error} {advice(placement, stores.codecs, shapes, num_tokens, held, host_bytes)}".rstrip())


def _a_shape(contents: Contents) -> KVShape:
    """Return the shape of the states in the first of our layers that holds some."""
    return next(layer.store.shape for layer in contents.ours if layer.store is not None)


def _buffers(stores: LayerStores, layers: Iterable[object]) -> Iterator[tuple[torch.device, int]]:
    """Yield device and bytes of each buffer of these layers, and of each that layers share."""
    # Copies of what another thread, which runs the model, may add to meanwhile.
    for staging in tuple(stores.stagings.values()):
        for slot in staging.slots:
            yield from ((buffer.device, buffer.num_bytes) for buffer in (slot.keys, slot.values))
    for device, scratch in tuple(stores.scratches.items()):
        yield device, scratch.num_bytes
    for layer in layers:
        if isinstance(layer, HybridLayer):
            yield from ((buffer.device, buffer.num_bytes) for buffer in layer.buffers())
            yield from ((states.device, states.nbytes) for pair in layer.pending for states in pair)
        else:
            yield from ((tensor.device, tensor.nbytes) for tensor in tensors_of(layer))
