"""Keys and values kept in host memory and streamed to the compute device for each use."""

import copy
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from ..kv_store import KVShape, Pair
from ..memory.growth import InitialCapacity
from ..memory.host_memory import HostBudget
from ..memory.page_lock import can_page_lock
from ..streaming.staging import HostCopies, Staging
from .host_blocks import HostBlocks

Used = TypeVar("Used")


class Streamed(HostBlocks):
    """
    Keys and values in host memory, which is the truth about them; the device holds copies in staging slots.

    States that `append` and `read` return stay valid as long as they, or slices of them, are held.

    Args:
        shape: of the states.
        capacity: of the buffers before the first token.
        budget: asked before host memory is used.
        staging: the slots of the compute device, shared by its layers.
        resident: keep the device copy for good.
        pinned: page-lock the host memory.
        packed: states are packed blocks.

    Attributes:
        is_streamed: the next use is expected on the device; `False` while tokens are only added and attended to on the
            host.
        streamed_from: first token that the next use on the device needs, the first of a row.
        copies: copies from and to the host memory that may be under way.
    """

    def __init__(
        self,
        shape: KVShape,
        capacity: InitialCapacity,
        budget: HostBudget,
        staging: Staging,
        resident: bool = False,
        pinned: bool = False,
        packed: bool = False,
    ):
        super().__init__(shape, capacity, budget, packed, pinned_for=shape.device if pinned else None)
        self.resident = resident
        self.staging = staging
        self.is_streamed = True
        self.streamed_from = 0
        self._watch_copies()
        # Tokens on their way to the host, where they must then be put into their blocks.
        self._arriving: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        staging.register(self)

    def __deepcopy__(self, memo: dict) -> "Streamed":
        self.wait_for_copies()
        twin = self._duplicate(memo)
        twin._arriving = []
        twin.staging = copy.deepcopy(self.staging, memo)
        twin._watch_copies()
        return twin

    def _watch_copies(self) -> None:
        """Let copies end before the memory that they use is freed, also when the store is dropped."""
        self.copies = HostCopies(self.staging.streams)
        weakref.finalize(self, _end_copies, self.copies).atexit = False

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        self.streamed_from = 0
        self.stage(keys, values)
        return self.read_staged()

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._retried_with_less_on_device(lambda: self._stage(keys, values))

    def _stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        start, end = self.num_entries, self.num_entries + keys.shape[2]
        if self._arriving or end > min(self.keys.capacity, self.values.capacity):
            # Growing copies host memory on this thread, so the newest tokens must have arrived there.
            self.wait_for_copies()
        self.is_streamed = True
        self.reserve(end)
        self.staging.count_use(self)
        slot = self.staging.slot_with_past(self, end, orders_computation=end > start)
        if end > start:  # packed blocks come once in 64 steps
            slot.write(start, keys, values)
            self.staging.save(self, slot, start, end)
        slot.num_tokens = end
        self._set_length(end)
        self.staging.prefetch_after(self)

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.wait_for_copies()
        self.is_streamed = False
        self.staging.vacate(self)  # also after a read, which fetched what is here
        if keys.device.type == "cpu":  # nothing to wait for, and the caller may write to them afterwards
            super().write(keys, values)
            return
        start, end = self.num_entries, self.num_entries + keys.shape[2]
        self.reserve(end)
        # torch copies to page-locked memory here, which it uses again once the copy is done.
        is_locked = can_page_lock(keys.device.type)
        on_host = [new.to("cpu", non_blocking=is_locked) for new in (keys, values)]
        self._arriving.append((start, on_host[0], on_host[1]))
        self.copies.saved = self.staging.streams.computed()
        self._set_length(end)

    def read(self) -> Pair:
        self.streamed_from = 0
        return self.read_staged()

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks that are stored, packed or not."""
        return self.num_entries // self.keys.row_entries

    def stream_from(self, block: int) -> None:
        """Let the next use on the device need tokens, or packed blocks, only from `block` on."""
        self.streamed_from = block * self.keys.row_entries

    def staged_range(self) -> tuple[int, int]:
        return self.streamed_from, self.num_entries

    def read_staged(self) -> Pair:
        if self._arriving:
            self.wait_for_copies()
        start, end = self.staged_range()
        return self._retried_with_less_on_device(lambda: self.staging.slot_with_past(self, end).lend(start, end))

    def truncate(self, num_tokens: int) -> None:
        super().truncate(num_tokens)
        self.streamed_from = min(self.streamed_from, self.num_blocks * self.keys.row_entries)
        self.staging.truncate(self)

    def select(self, indices: torch.Tensor) -> None:
        indices = indices.to("cpu")
        if torch.equal(indices, torch.arange(self.shape.batch)):
            return
        self.wait_for_copies()
        # First: after an interruption, the device copy is stale.
        self.staging.invalidate(self)
        super().select(indices)

    def wait_for_copies(self) -> None:
        self.copies.wait()
        for start, keys, values in self._arriving:
            self.keys.write(start, keys)
            self.values.write(start, values)
        self._arriving = []

    def wait_until_stored(self) -> None:
        if self._arriving:
            self.wait_for_copies()
        else:
            self.copies.wait_for_saved()

    def close(self) -> None:
        super().close()
        self.staging.release(self)

    def _retried_with_less_on_device(self, use: Callable[[], Used]) -> Used:
        """Return the result of `use`; if the device has no memory, give up others' device copies and try again."""
        held = self.num_entries
        try:
            return use()
        except torch.OutOfMemoryError:
            if self.num_entries != held or not self.is_intact or not self.staging.give_up_others(self):
                raise
        return use()


def _end_copies(copies: HostCopies) -> None:
    copies.wait()
