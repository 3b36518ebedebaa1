"""Device copies of the layers that live in host memory: fetched ahead of use, given up without a transfer."""

import copy
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..buffers.token_buffer import TokenBuffer
from ..kv_store import KVShape
from .stats import CacheStats
from .streams import Event, Streams

if TYPE_CHECKING:
    from ..runs.streamed import Streamed


class HostCopies:
    """
    The copies that read or write the host memory of one store.

    Attributes:
        saved: the newest copy to the host.
        fetched: the newest copy to the device.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self.saved: Event = None
        self.fetched: Event = None

    def wait(self) -> None:
        """Block the calling thread until all copies are done."""
        self.wait_for_saved()
        self._streams.wait(self.fetched)

    def wait_for_saved(self) -> None:
        """Block the calling thread until the copies to the host are done."""
        self._streams.wait(self.saved)


class Slot:
    """
    Memory on the device for one layer's keys and values, reused for one layer after another.

    Attributes:
        first: first token of its owner that is here, or on its way.
        num_tokens: the token after the last one that is here, or on its way.
        arrived: the copy that brings them.
        saved: the copy that takes the newest of them to the host.
    """

    # Class attributes, for a slot whose construction was interrupted.
    arrived: Event = None
    saved: Event = None

    def __init__(self, shape: KVShape, streams: Streams):
        self._streams = streams
        self._owner: weakref.ref[Streamed] | None = None
        self.first = self.num_tokens = 0
        self._build(shape)

    @property
    def owner(self) -> "Streamed | None":
        """The layer whose tokens are here, or on their way."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, store: "Streamed | None") -> None:
        # Weak, so that a cache that is dropped gives its memory back at once.
        self._owner = None if store is None else weakref.ref(store)

    def __del__(self) -> None:
        # A copy in flight must not outlive the memory it reads or writes.
        if not sys.is_finalizing():
            for event in (self.arrived, self.saved):
                if event is not None:
                    self._streams.wait(event)

    def _build(self, shape: KVShape) -> None:
        keys = TokenBuffer(shape.keys, shape.key_dtype, shape.device, token_major=True)
        values = TokenBuffer(shape.values, shape.value_dtype, shape.device, token_major=True)
        self.shape, self.keys, self.values = shape, keys, values

    def holds_past_of(self, store: "Streamed") -> bool:
        """Return whether all tokens of `store` that are used on the device are here, or on their way."""
        return self.first <= store.streamed_from and self.num_tokens >= store.num_entries

    def ensure_capacity(self, shape: KVShape, num_tokens: int, keep: int) -> None:
        """Grow the slot for tokens of `shape` up to `num_tokens`; those before `keep` are here and stay."""
        num_tokens, keep = num_tokens - self.first, max(0, keep - self.first)
        # Memory that is given back is reused by computation at once, so computation waits for copies that use it.
        if shape != self.shape or num_tokens > min(self.keys.capacity, self.values.capacity):
            self._streams.compute_after(self.arrived)
            self._streams.compute_after(self.saved)
        if shape != self.shape:
            assert keep == 0
            self._build(shape)
        self.keys.ensure(num_tokens, keep)
        self.values.ensure(num_tokens, keep)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens from `start` on, after the old ones were copied to the host."""
        self._streams.compute_after(self.saved)
        self.keys.write(start - self.first, keys)
        self.values.write(start - self.first, values)

    def lend(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of tokens `start` to `end`. The slot keeps its content as long as anyone holds a part of one."""
        start, end = start - self.first, end - self.first
        return self.keys.read_range(start, end), self.values.read_range(start, end)

    @property
    def is_lent(self) -> bool:
        return self.keys.is_lent or self.values.is_lent


class Staging:
    """
    The slots of one device, and the order in which its layers take turns in them.

    Each resident layer has a slot of its own. The others share `prefetch_layers + 1`: one for the layer that is
    attended to, the rest for those that follow, in the cycle in which the model uses its layers.

    Every hand-over is ordered by events in both directions. A copy to the device waits for the computation that read
    the slot before, for the copy to the host of the slot's old content, and for the copy to the host of the tokens
    that it reads. Computation waits for the copy that it needs, and for the copy to the host of what it overwrites.

    Args:
        streams: of the device.
        prefetch_layers: layers to fetch ahead.
        stats: counted into.
    """

    def __init__(self, streams: Streams, prefetch_layers: int, stats: CacheStats):
        self.streams = streams
        self.prefetch_layers = prefetch_layers
        self.stats = stats
        self.slots: list[Slot] = []
        # All stores in the order of their first use, which is the order of the model's layers.
        self._registered: list[weakref.ref[Streamed]] = []

    def __deepcopy__(self, memo: dict) -> "Staging":
        streams, stats = copy.deepcopy((self.streams, self.stats), memo)
        twin = Staging(streams, self.prefetch_layers, stats)
        memo[id(self)] = twin
        for store in self._stores:
            twin.register(copy.deepcopy(store, memo))
        return twin

    @property
    def _stores(self) -> list["Streamed"]:
        return [store for reference in self._registered if (store := reference()) is not None]

    def register(self, store: "Streamed") -> None:
        self._registered.append(weakref.ref(store))

    def release(self, store: "Streamed") -> None:
        """Forget `store`; its slot is free, and gone when it was resident or the last."""
        self._registered.remove(weakref.ref(store))
        slot = self._slot_of(store)
        if slot is not None:
            slot.owner = None
            if store.resident:
                self.slots.remove(slot)
        if not self._registered:
            self.slots.clear()

    def count_use(self, store: "Streamed") -> None:
        """Note whether the past of `store` is here, or on its way, now that it is needed."""
        slot = self._slot_of(store)
        if slot is None or not slot.holds_past_of(store):
            self.stats.prefetch_misses += store.num_entries > 0
        elif store.num_entries > 0 and not store.resident:
            self.stats.prefetch_hits += 1

    def slot_with_past(self, store: "Streamed", num_tokens: int, orders_computation: bool = True) -> Slot:
        """
        Return a slot with the past tokens of `store`, fetched if they are not there, and memory up to `num_tokens`.

        The calling thread never waits for the bus: computation on the device that is issued from now on runs after the
        copy. Without `orders_computation` it does not; ask again before the tokens are used.
        """
        slot = self._slot_of(store)
        if slot is None or not slot.holds_past_of(store):
            fetch = self._fetch if store.num_entries > 0 else self._claim
            slot = fetch(store, current=store)
        slot.ensure_capacity(store.shape, num_tokens, keep=store.num_entries)
        if orders_computation:
            self.streams.compute_after(slot.arrived)
        return slot

    def save(self, store: "Streamed", slot: Slot, start: int, end: int) -> None:
        """Copy the whole blocks with tokens `start` to `end` from the slot to the host."""

        def copy_both() -> None:
            store_keys.save(slot_keys, start, end, first)
            store_values.save(slot_values, start, end, first)

        # The buffers, not their owners, which may have others by the time the copy runs.
        store_keys, store_values, slot_keys, slot_values = store.keys, store.values, slot.keys, slot.values
        first = slot.first
        store.copies.saved = slot.saved = self.streams.copy_to_host(copy_both, after=[self.streams.computed()])
        row = store.keys.row_entries
        self.stats.bytes_to_host += (store.keys.rows(end) - start // row) * row * store.bytes_per_token

    def prefetch_after(self, store: "Streamed") -> None:
        """Start fetching the layers that follow `store` and are not on the device yet."""
        stores = self._stores
        position = stores.index(store)
        following = stores[position + 1 :] + stores[:position]
        upcoming = [other for other in following if other.is_streamed and not other.resident]
        for other in upcoming[: self.prefetch_layers]:
            slot = self._slot_of(other)
            if other.num_entries > 0 and (slot is None or not slot.holds_past_of(other)):
                try:
                    self._fetch(other, current=store)
                except torch.OutOfMemoryError:
                    self.vacate(other)  # it is fetched when it is needed
                    return

    def planned_bytes(self, shape: KVShape, num_layers: int, sizes: Sequence[int]) -> int:
        """Return the bytes of the slots for layers of `shape`, none resident, after growing to each of `sizes`."""
        slot = Slot(shape, self.streams)
        num_slots = min(self.prefetch_layers + 1, num_layers)
        return num_slots * (slot.keys.planned_bytes(sizes) + slot.values.planned_bytes(sizes))

    def invalidate(self, store: "Streamed") -> None:
        """Note that the device copy of `store` differs from host memory."""
        slot = self._slot_of(store)
        if slot is not None:
            slot.first = slot.num_tokens = 0
            if slot.is_lent:
                self._let_go(slot)

    def truncate(self, store: "Streamed") -> None:
        """Cut the device copy of `store` to its length: other tokens may follow on the host alone."""
        slot = self._slot_of(store)
        if slot is not None and slot.num_tokens > store.num_entries:
            slot.num_tokens = store.num_entries
            if slot.is_lent:
                self._let_go(slot)

    def vacate(self, store: "Streamed") -> None:
        """Give up the device copy of `store`, and the memory it is in, with slots that were left to callers."""
        self.slots = [slot for slot in self.slots if slot.owner is not store and slot.owner is not None]

    def give_up_others(self, current: "Streamed") -> bool:
        """
        Give up the device copies of all layers but `current`, resident ones too, after the device ran out of memory.

        Returns:
            whether there were any, and it may have room now.
        """
        given_up = [slot for slot in self.slots if slot.owner is not current and not slot.is_lent]
        owners = [slot.owner for slot in given_up if slot.owner is not None]
        self.slots = [slot for slot in self.slots if slot not in given_up]
        self.stats.evictions += sum(slot.num_tokens > 0 for slot in given_up)
        resident = [owner for owner in owners if owner.resident]
        for owner in resident:
            owner.resident = False
        if resident:
            warnings.warn(
                f"The device ran out of memory: {len(resident)} resident layers are streamed from now on. Use fewer "
                "resident_layers, or a smaller prefill_chunk_size in generate.",
                stacklevel=2,
            )
        return bool(given_up)

    def _let_go(self, slot: Slot) -> None:
        """Leave the memory of a slot to those who hold tensors in it."""
        if slot.owner is not None and slot.owner.resident:
            self.slots.remove(slot)
        slot.owner = None

    def _slot_of(self, store: "Streamed") -> Slot | None:
        return next((slot for slot in self.slots if slot.owner is store), None)

    def _fetch(self, store: "Streamed", current: "Streamed") -> Slot:
        first, end = store.streamed_from, store.num_entries
        slot = self._claim(store, current)
        slot.first = first
        slot.ensure_capacity(store.shape, end, keep=0)

        def copy_both() -> None:
            store_keys.load(slot_keys, first, end)
            store_values.load(slot_values, first, end)

        store_keys, store_values, slot_keys, slot_values = store.keys, store.values, slot.keys, slot.values
        before = [self.streams.computed(), slot.saved, store.copies.saved]
        store.copies.fetched = slot.arrived = self.streams.copy_to_device(copy_both, after=before)
        slot.num_tokens = end
        self.stats.bytes_to_device += (end - first) * store.bytes_per_token
        return slot

    def _claim(self, store: "Streamed", current: "Streamed") -> Slot:
        """Return the slot of `store`, else a free one, else that of the layer needed last, counted from `current`."""
        slot = self._slot_of(store)
        if slot is not None:
            slot.first = slot.num_tokens = 0
            return slot
        shared = [slot for slot in self.slots if slot.owner is None or not slot.owner.resident]
        free = [slot for slot in shared if slot.owner is not current and not slot.is_lent]
        if store.resident or len(shared) <= self.prefetch_layers or not free:
            slot = Slot(store.shape, self.streams)
            self.slots.append(slot)
        else:
            slot = max(free, key=lambda slot: self._steps_until(slot.owner, current))
            self.stats.evictions += slot.num_tokens > 0
        slot.owner, slot.first, slot.num_tokens = store, 0, 0
        return slot

    def _steps_until(self, owner: "Streamed | None", current: "Streamed") -> int:
        """Return the number of layers until `owner` is used; a slot without an owner is never used."""
        stores = self._stores
        if owner is None:
            return len(stores)
        return (stores.index(owner) - stores.index(current)) % len(stores)
