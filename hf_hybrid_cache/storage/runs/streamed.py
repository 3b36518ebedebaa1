"""Keys and values in host memory that are streamed to the compute device, and the slots there that layers share."""

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any, TypeVar

import torch

from ..kv_shape import KVShape, Pair
from ..memory.buffer_memory import DeviceMemory
from ..memory.growth import InitialCapacity
from ..memory.host_memory import HostBudget
from ..memory.page_lock import can_page_lock
from ..stats import CacheStats
from .run import HostBlocks
from .streams import Event, Streams
from .token_buffer import TokenBuffer

Used = TypeVar("Used")


class Slot:
    """
    Memory on the device for one layer's keys and values, reused for one layer after another.

    Attributes:
        first: first entry of its run that is here, or on its way.
        end: the entry after the last one that is here, or on its way.
        arrived: the copy that brings them.
        saved: the copy that takes the newest of them to the host.
    """

    # Class attributes, for a slot whose construction was interrupted.
    arrived: Event = None
    saved: Event = None

    def __init__(self, shape: KVShape, streams: Streams):
        self.shape, self._streams = shape, streams
        self.first = self.end = self._capacity = 0
        memory = DeviceMemory(shape.device)
        self.keys = TokenBuffer(shape.keys, shape.key_dtype, memory, token_major=True)
        self.values = TokenBuffer(shape.values, shape.value_dtype, memory, token_major=True)

    def __del__(self) -> None:
        # A copy in flight must not outlive the memory it reads or writes.
        if not sys.is_finalizing():
            for event in (self.arrived, self.saved):
                if event is not None:
                    self._streams.wait(event)

    def ensure(self, num_entries: int, keep: int) -> None:
        """Make room for `num_entries`; the first `keep` stay."""
        if num_entries > self._capacity:
            # Memory that is given back is reused by computation at once, so computation waits for copies that use it.
            self._streams.compute_after(self.arrived)
            self._streams.compute_after(self.saved)
            self.keys.ensure(num_entries, keep)
            self.values.ensure(num_entries, keep)
            self._capacity = min(self.keys.capacity, self.values.capacity)


class Staging:
    """
    The order in which the layers of one device take turns in slots.

    They share `prefetch_layers + 1`: one for the layer that is attended to, the rest for those that follow, in the
    cycle in which the model uses its layers.

    Every hand-over is ordered by events in both directions. A copy to the device waits for the computation that read
    the slot before, for the copy to the host of the slot's old content, and for the copy to the host of the tokens
    that it reads. Computation waits for the copy that it needs, and for the copy to the host of what it overwrites.

    Args:
        prefetch_layers: layers to fetch ahead.
    """

    def __init__(self, streams: Streams, prefetch_layers: int, stats: CacheStats):
        self.streams, self.prefetch_layers, self.stats = streams, prefetch_layers, stats
        # In the order of their first use, which is that of the model's layers. Weak, so that a cache that is dropped
        # gives its memory back at once.
        self._runs: list[weakref.ref[Streamed]] = []

    def __deepcopy__(self, memo: dict) -> "Staging":
        """Return one without runs: they register when they are copied."""
        streams, stats = copy.deepcopy((self.streams, self.stats), memo)
        memo[id(self)] = twin = Staging(streams, self.prefetch_layers, stats)
        return twin

    def register(self, run: "Streamed") -> None:
        self._runs = [reference for reference in self._runs if reference() is not None]
        self._runs.append(weakref.ref(run))

    @property
    def slots(self) -> list[Slot]:
        """All slots, also while another thread uses the cache."""
        return [slot for run in filter(None, map(call, self._runs)) if (slot := run.slot) is not None]

    def order_from(self, current: "Streamed") -> list["Streamed"]:
        """Return the runs in the order in which they are used from now on, `current` first."""
        runs = [*filter(None, map(call, self._runs))]
        position = runs.index(current)
        return runs[position:] + runs[:position]

    def prefetch(self, order: list["Streamed"]) -> None:
        """Start fetching the layers that follow the first one of `order` and are not on the device yet."""
        left = self.prefetch_layers
        for run in order[1:]:
            if not left:
                return
            if not run.is_streamed:
                continue
            left -= 1
            if run.num_entries > 0 and run.slot_with_past() is None:
                try:
                    run.fetch(order)
                except torch.OutOfMemoryError:
                    run.slot = None  # it is fetched when it is needed
                    return

    def claim(self, run: "Streamed", order: list["Streamed"]) -> Slot:
        """
        Give `run` an empty slot with memory for its past.

        It is its own, else that of the layer that is used last in `order`, or a new one while there are few. Memory in
        which somebody holds tensors is left to them.
        """
        slot = None if run.is_lent else run.slot
        if slot is None:
            others = [other for other in order if other.slot is not None]
            free = [other for other in others if other is not order[0] and not other.is_lent]
            if free and len(others) > self.prefetch_layers:
                slot, free[-1].slot = free[-1].slot, None
        if slot is None or slot.shape != run.shape:
            slot = Slot(run.shape, self.streams)
        slot.end, slot.first = 0, run.streamed_from
        slot.ensure(run.num_entries - slot.first, keep=0)
        run.slot = slot
        return slot

    def give_up_others(self, current: "Streamed") -> bool:
        """Give up all device copies but that of `current`; return whether there were any."""
        given_up = [run for run in self.order_from(current)[1:] if run.slot is not None and not run.is_lent]
        for run in given_up:
            run.slot = None
        return bool(given_up)

    def planned_bytes(self, shape: KVShape, num_layers: int, sizes: Sequence[int]) -> int:
        """Return the bytes of the slots for layers of `shape` after growing to each of `sizes`."""
        slot = Slot(shape, self.streams)
        num_slots = min(self.prefetch_layers + 1, num_layers)
        return num_slots * (slot.keys.planned_bytes(sizes) + slot.values.planned_bytes(sizes))


class Streamed(HostBlocks):
    """
    Keys and values in host memory, which is the truth about them; the device holds a copy in a slot.

    States that are read stay valid as long as they, or slices of them, are held.

    Args:
        staging: of the compute device, shared by its layers.
        pinned: page-lock the host memory.

    Attributes:
        slot: where the device copy is; `None` if there is none.
        is_streamed: the next use is expected on the device; `False` while tokens are only added and attended to on the
            host.
        streamed_from: first token that the next use on the device needs, the first of a row.
        saved: the newest copy to the host.
        fetched: the newest copy to the device.
    """

    # Class attributes, for a run whose construction was interrupted.
    saved: Event = None
    fetched: Event = None

    def __init__(
        self,
        shape: KVShape,
        capacity: InitialCapacity,
        budget: HostBudget,
        staging: Staging,
        pinned: bool = False,
        packed: bool = False,
    ):
        super().__init__(shape, capacity, budget, packed, pinned_for=shape.device if pinned else None)
        self.staging = staging
        self.slot: Slot | None = None
        self.is_streamed = True
        self.streamed_from = 0
        # Tokens on their way to the host, where they must then be put into their blocks.
        self._arriving: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        staging.register(self)

    def __deepcopy__(self, memo: dict) -> "Streamed":
        self.wait_for_copies()
        twin = super().__deepcopy__(memo)
        twin.slot = twin.saved = twin.fetched = None
        twin._arriving = []
        twin.staging = copy.deepcopy(self.staging, memo)
        twin.staging.register(twin)
        return twin

    def __del__(self) -> None:
        # A copy in flight must not outlive the memory it reads or writes.
        if not sys.is_finalizing():
            for event in (self.saved, self.fetched):
                if event is not None:
                    self.staging.streams.wait(event)

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """
        Store new entries after the others.

        With `on_device` they go through the slot, where those from `streamed_from` on are brought, too, and the
        following layers are fetched ahead. Else the next use is on the host, and the slot is given up.
        """
        if on_device:
            self._with_room_on_device(self._write_through_slot, keys, values)
            return
        self.wait_for_copies()
        self.is_streamed = False
        self.slot = None  # also after a read, which fetched what is here
        if keys.device.type == "cpu":  # nothing to wait for, and the caller may write to them afterwards
            super().write(keys, values)
            return
        start, end = self.num_entries, self.num_entries + keys.shape[2]
        self.reserve(end)
        # torch copies to page-locked memory here, which it uses again once the copy is done.
        is_locked = can_page_lock(keys.device.type)
        on_host = [new.to("cpu", non_blocking=is_locked) for new in (keys, values)]
        self._arriving.append((start, on_host[0], on_host[1]))
        self.saved = self.staging.streams.computed()
        self.num_entries = end

    def _write_through_slot(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        start, end = self.num_entries, self.num_entries + keys.shape[2]
        streams, stats = self.staging.streams, self.staging.stats
        if self._arriving or end > self._room:
            # Growing copies host memory on this thread, so the newest tokens must have arrived there.
            self.wait_for_copies()
            self.reserve(end)
        self.is_streamed = True
        order, slot = self.staging.order_from(self), self.slot_with_past()
        if slot is None:
            stats.prefetch_misses += start > 0
            slot = self.fetch(order)
        there = slot.first
        slot.ensure(end - there, keep=start - there)
        if end > start:  # packed blocks come once in 64 steps
            streams.compute_after(slot.arrived)
            streams.compute_after(slot.saved)
            slot.keys.write(start - there, keys)
            slot.values.write(start - there, values)
            # The methods are of the buffers: their owners may have others by the time the copies run.
            copies = (
                partial(self.keys.save, slot.keys, start, end, there),
                partial(self.values.save, slot.values, start, end, there),
            )
            self.saved = slot.saved = streams.copy_to_host(*copies, after=[streams.computed()])
            row = self.keys.row_entries
            stats.bytes_to_host += (-(-end // row) - start // row) * row * self.bytes_per_token
        slot.end = end
        self.num_entries = end
        self.staging.prefetch(order)

    def fetch(self, order: list["Streamed"]) -> Slot:
        """Start copying the entries from `streamed_from` on to a slot; `order` is that of the staging."""
        start, end, streams = self.streamed_from, self.num_entries, self.staging.streams
        slot = self.staging.claim(self, order)
        if end > 0:
            copies = partial(self.keys.load, slot.keys, start, end), partial(self.values.load, slot.values, start, end)
            before = [streams.computed(), slot.saved, self.saved]
            self.fetched = slot.arrived = streams.copy_to_device(*copies, after=before)
            slot.end = end
            self.staging.stats.bytes_to_device += (end - start) * self.bytes_per_token
        return slot

    def slot_with_past(self) -> Slot | None:
        """Return the slot if all entries from `streamed_from` on are there, or on their way."""
        slot = self.slot
        is_here = slot is not None and slot.first <= self.streamed_from and slot.end >= self.num_entries
        return slot if is_here else None

    def _with_room_on_device(self, use: Callable[..., Used], *arguments: Any) -> Used:
        """Return the result of `use`; if the device has no memory, give up others' device copies and try again."""
        held = self.num_entries
        try:
            return use(*arguments)
        except torch.OutOfMemoryError:
            if self.num_entries != held or not self.is_intact or not self.staging.give_up_others(self):
                raise
        return use(*arguments)

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds a part of what was read."""
        slot = self.slot
        return slot is not None and (slot.keys.held.uses.is_shared or slot.values.held.uses.is_shared)

    def read(self, start: int = 0, end: int | None = None) -> Pair:
        self.streamed_from = min(self.streamed_from, start)
        if self._arriving:
            self.wait_for_copies()
        slot = self.slot_with_past()
        if slot is None:
            slot = self._with_room_on_device(self.fetch, self.staging.order_from(self))
        self.staging.streams.compute_after(slot.arrived)
        first, last = start - slot.first, (self.num_entries if end is None else end) - slot.first
        return slot.keys.read_range(first, last), slot.values.read_range(first, last)

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks that are stored, packed or not."""
        return self.num_entries // self.keys.row_entries

    def stream_from(self, block: int) -> None:
        """Let the next use on the device need tokens, or packed blocks, only from `block` on."""
        self.streamed_from = block * self.keys.row_entries

    def truncate(self, num_tokens: int) -> None:
        slot = self.slot
        if slot is not None and slot.end > num_tokens:
            slot.end = num_tokens  # other tokens may follow on the host alone
            if self.is_lent:
                self.slot = None  # its memory is left to those who hold tensors in it
        super().truncate(num_tokens)
        self.streamed_from = min(self.streamed_from, self.num_blocks * self.keys.row_entries)

    def select(self, indices: torch.Tensor) -> None:
        indices = indices.to("cpu")
        if torch.equal(indices, torch.arange(self.shape.batch)):
            return
        self.wait_for_copies()
        # First: after an interruption, the device copy is stale.
        self.slot = None
        super().select(indices)

    def wait_for_copies(self) -> None:
        streams = self.staging.streams
        streams.wait(self.saved)
        streams.wait(self.fetched)
        for start, keys, values in self._arriving:
            self.keys.write(start, keys)
            self.values.write(start, values)
        self._arriving = []

    def wait_until_stored(self) -> None:
        if self._arriving:
            self.wait_for_copies()
        else:
            self.staging.streams.wait(self.saved)

    def close(self) -> None:
        self.slot, self.is_streamed = None, False
