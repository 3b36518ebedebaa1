"""The contents of a cache: its layers, and the memory that they take."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..layers import HybridLayer, LayerStores, move_tensors_of, tensors_of
from ..scalars import num_common_keys
from ..storage import require_host_bytes
from .checkpoints import Checkpoint


@dataclass(frozen=True)
class MemoryReport:
    """
    The size of a cache, measured from its buffers.

    Attributes:
        device_bytes: in the memory of accelerators.
        host_bytes: in host memory.
        num_tokens: tokens of each sequence.
        working_bytes: in host memory, in which attention on the CPU works, one layer after the other.
    """

    device_bytes: int
    host_bytes: int
    num_tokens: int
    working_bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes held for each token of each sequence's context, wherever they are; 0 for an empty cache."""
        return (self.device_bytes + self.host_bytes) / self.num_tokens if self.num_tokens else 0.0


class _Origin(NamedTuple):
    """
    The keys under which a prefix store has states, `[tokens]`, for an identity.

    Attributes:
        num_edits: of the layers when the keys were those of their states.
    """

    identity: bytes
    keys: np.ndarray
    num_edits: int


class Contents:
    """
    The layers of a cache, and their checkpoints.

    Attributes:
        layers: in the order of the model; the types of those of transformers' own differ between its versions.
        stores: where ours get their stores.
        checkpoints: by the lengths that the cache can go back to.
        ours: layers of full attention.
        theirs: layers of transformers' own.
        of_text: layers of attention by index, without those that store images.
    """

    def __init__(self, layers: list[Any], stores: LayerStores):
        self.layers, self.stores = layers, stores
        self.checkpoints: dict[int, Checkpoint] = stores.checkpoints
        self._origin = _Origin(b"", np.zeros(0, np.uint32), 0)
        self.ours = [layer for layer in layers if isinstance(layer, HybridLayer)]
        self.theirs = [layer for layer in layers if not isinstance(layer, HybridLayer)]
        of_images = getattr(stores.config, "cross_attention_layers", None) or ()
        self.of_text = {
            index: layer
            for index, layer in enumerate(layers)
            if isinstance(layer, CacheLayerMixin) and index not in of_images
        }

    @property
    def num_tokens(self) -> int:
        """Tokens in the first layer of attention, also while others hold more or less; 0 without one."""
        return next((layer.get_seq_length() for layer in self.of_text.values()), 0)

    def note_keys(self, identity: bytes, keys: np.ndarray) -> None:
        """Note the keys under which a prefix store finds the states of the first tokens, `[tokens]`, by an identity."""
        self._origin = _Origin(identity, keys, self.stores.num_edits)

    def keys(self, identity: bytes) -> np.ndarray:
        """Return the keys that were noted for an identity, of the first tokens, whose states have not changed since."""
        is_valid = (self._origin.identity, self._origin.num_edits) == (identity, self.stores.num_edits)
        return self._origin.keys if is_valid else np.zeros(0, np.uint32)

    def num_alike(self, other: "Contents") -> int:
        """Return how many first tokens have the same states in another cache, as a prefix store knows them."""
        return num_common_keys(self.keys(self._origin.identity), other.keys(self._origin.identity))

    def forget_keys(self) -> None:
        """Forget the keys of tokens that are not stored any more, in whose place others may come."""
        self._origin = self._origin._replace(keys=self._origin.keys[: self.num_tokens])

    def settle(self, unseen: bool = True) -> None:
        """Choose the codecs of states that wait for them, by what is known now; `unseen`: also without queries."""
        for layer in self.ours:
            if layer.store is not None and (unseen or not layer.store.lacks_queries):
                layer.store.settle()

    def require_whole(self) -> None:
        """Raise `IncompleteCacheError` if something has ended a change half-way."""
        for layer in self.ours:
            layer.usable_store()

    @contextmanager
    def changing(self, operation: str) -> Iterator[dict[int, Checkpoint]]:
        """
        Mark the cache as not whole if an operation on all layers is interrupted after it has changed some.

        Yield the checkpoints, which the operation lets follow: a layer that changes alone drops them.
        """
        before, checkpoints = self._versions(), dict(self.checkpoints)
        try:
            yield checkpoints
        except BaseException:
            # Layers of transformers' own do not tell whether they have changed.
            if self.theirs or self._versions() != before:
                self.stores.unfinished = operation
            raise
        finally:
            self.checkpoints.update(checkpoints)

    def _versions(self) -> list[int | None]:
        return [None if layer.store is None else layer.store.version for layer in self.ours]

    def measured(self) -> MemoryReport:
        """Measure the bytes that the cache holds, layers of transformers' own and checkpoints included."""
        sizes = {"host": 0, "device": 0}
        # A copy, because another thread, which runs the model, may add to them meanwhile.
        kept = ((each.device, each.nbytes) for kept in tuple(self.checkpoints.values()) for each in kept.tensors())
        for device, num_bytes in (*self._buffers(self.layers), *kept):
            sizes["host" if device.type == "cpu" else "device"] += num_bytes
        return MemoryReport(sizes["device"], sizes["host"], self.num_tokens, self.stores.attention.host.num_bytes)

    def described(self) -> str:
        """Return the kinds of layers, their places and sizes, in one line."""
        held = self.measured()
        places = ((held.device_bytes, "on the device"), (held.host_bytes, "in host memory"))
        sizes = (f"{num_bytes / 2**20:.1f} MiB {place}" for num_bytes, place in places if num_bytes)
        awaited = ["some to be quantized"] * any(layer.store is not None and layer.store.waits for layer in self.ours)
        content = ", ".join([f"{held.num_tokens:,} tokens", *awaited, *sizes]) if held.num_tokens else "empty"
        return f"{', '.join(self._kinds_of_layers())}; {content}"

    def _kinds_of_layers(self) -> Iterator[str]:
        """Yield the number of layers of each kind, and their place."""
        stores, placement = self.stores, self.stores.placement
        widths = {index: (codec.keys.bits, codec.values.bits) for index, codec in stores.codecs.items()}
        windows = sum(layer.is_sliding for layer in self.ours)
        for bits, number in Counter(widths.get(each.layer_idx) for each in self.ours if not each.is_sliding).items():
            kind = "in full precision" if bits is None else f"of {' and '.join(map(str, dict.fromkeys(bits)))} bits"
            yield f"{number} layer{'' if number == 1 else 's'} {kind}"
        if windows:
            yield f"{windows} with a window"
        if self.theirs:
            yield f"{len(self.theirs)} of transformers' own"
        if stores.peers is not None:
            yield f"share {stores.peers.rank + 1} of {stores.peers.size}"
        if placement.offload:
            yield "offloaded"
        if placement.device_tokens:
            yield f"up to {placement.device_tokens:,} tokens of each on the device"
        if any(layer.is_attended_on_cpu for layer in self.ours):
            yield "attended to on the CPU"

    def require_room_for_copies(self, number: int, purpose: str, are_shared: bool = False) -> None:
        """
        Raise `HostMemoryError` unless what is held fits `number` times, and one buffer once more to be exchanged.

        With `are_shared` layers need none for what copies share. The message begins with `purpose`.
        """
        copied = [layer for layer in self.layers if not (are_shared and getattr(layer, "shares_copies", False))]
        sizes = [num_bytes for device, num_bytes in self._buffers(copied) if device.type == "cpu"]
        require_host_bytes((number - 1) * sum(sizes) + max(sizes, default=0), purpose)

    def _buffers(self, layers: Iterable[object]) -> Iterator[tuple[torch.device, int]]:
        """Yield device and bytes of each buffer of these layers, and of each that layers share."""
        # Copies of what another thread, which runs the model, may add to meanwhile.
        for staging in tuple(self.stores.stagings.values()):
            for slot in staging.slots:
                yield from ((buffer.device, buffer.num_bytes) for buffer in (slot.keys, slot.values))
        for device, scratch in tuple(self.stores.scratches.items()):
            yield device, scratch.num_bytes
        for layer in layers:
            if isinstance(layer, HybridLayer):
                yield from ((buffer.device, buffer.num_bytes) for buffer in layer.buffers())
            else:
                yield from ((tensor.device, tensor.nbytes) for tensor in tensors_of(layer))

    def move(self, *args: Any, **kwargs: Any) -> None:
        """Move all layers, or none; see `HybridCache.to` for arguments and errors."""
        parsed: tuple[torch.device | None, torch.dtype | None, bool, object] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, is_non_blocking, _ = parsed
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"Keys and values are floating-point numbers, and cannot be {dtype}.")
        if dtype is None and (device is None or is_non_blocking or "non_blocking" in kwargs):
            return
        if device is not None and device.type == "meta":
            raise ValueError("Keys and values cannot be moved to meta, which holds nothing. Use cache.reset().")
        if device is not None:
            device = torch.empty(0, device=device).device  # with its index, as the states of the model have it
        kept = (layer for checkpoint in self.checkpoints.values() for layer in checkpoint.stock.values())
        before = [(layer, *place) for layer in (*self.layers, *kept) if (place := _place_of(layer)) is not None]
        try:
            for layer, held_on, _ in before:
                _move(layer, device or held_on, dtype)
        except BaseException:
            for each in before:
                _move(*each)
            raise


def _place_of(layer: object) -> tuple[torch.device, torch.dtype] | None:
    """Return device and type of a layer's states; `None` for an empty layer."""
    if isinstance(layer, HybridLayer):
        return None if layer.store is None else (layer.device, layer.dtype)
    return next(((each.device, each.dtype) for each in tensors_of(layer) if each.is_floating_point()), None)


def _move(layer: object, device: torch.device, dtype: torch.dtype | None) -> None:
    if isinstance(layer, HybridLayer):
        layer.to(device, dtype)
    else:
        move_tensors_of(layer, device, dtype)
