"""Memory of buffers: of a device, where what is stored is copied to grow, and of the host, where it grows in place."""

import math
import mmap
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from .address_space import AddressSpace, reserve
from .growth import grown_capacity, least_capacity
from .host_memory import HostMemoryError, address_space_is_limited, tightest_limit
from .page_lock import PageLock, locks_in_place

_MAX_RESERVED_BYTES = 2**40


class StorageUses:
    """
    Counts the tensors that share a piece of memory: views, slices and arrays of NumPy, however they were made.

    Args:
        data: a tensor in it. Tensors that share it now belong to the owner; those that come later are others.
    """

    def __init__(self, data: torch.Tensor):
        self._storage = data.untyped_storage()
        self._of_owner = torch._C._storage_Use_Count(self._storage._cdata)

    @property
    def is_shared(self) -> bool:
        """Whether somebody beside the owner holds such a tensor."""
        return torch._C._storage_Use_Count(self._storage._cdata) > self._of_owner


@dataclass(eq=False)
class Piece:
    """
    One piece of memory, and views of it. It stays where it is; where it is too small, a larger one takes its place.

    Attributes:
        data: uint8 `[capacity * entry_bytes]`.
        entry_bytes: bytes of an entry.
        capacity: entries that fit.
        ready: entries that can be written; for others the host has only address space.
        space: the address space, where it was reserved.
        lock: its page-locked part, if there is to be one.
        stored, seen, array: what is stored, as the buffer's form lays it out, as it is seen, and for kernels.
        uses: of the memory, by others than its buffer.
    """

    data: torch.Tensor
    entry_bytes: int
    capacity: int
    ready: int
    space: AddressSpace | None = None
    lock: PageLock | None = None
    stored: torch.Tensor = field(init=False)
    seen: torch.Tensor = field(init=False)
    array: np.ndarray = field(init=False)
    uses: StorageUses = field(init=False)


@dataclass(frozen=True)
class DeviceMemory:
    """
    Memory of a device. It grows in chunks, which takes a copy of one tensor, once in thousands of tokens.

    Args:
        device: the device.
        expected_entries: capacity to take at the first entry.
        entry_tokens: tokens of an entry, 64 if it is a packed block.
    """

    device: torch.device
    expected_entries: int = 0
    entry_tokens: int = 1

    def ready_for(self, num_entries: int, entry_bytes: int) -> int:
        """Return the entries that can be written once the empty memory has grown to `num_entries`."""
        return self.capacity_for(num_entries)

    def capacity_for(self, num_entries: int, capacity: int = 0) -> int:
        """Return the capacity to have for `num_entries`, where it was `capacity` before."""
        return max(grown_capacity(num_entries, self.entry_tokens), self.expected_entries)

    def take(self, least: int, best: int, entry_bytes: int, kept: int = 0) -> Piece:
        """Take memory for `best` entries."""
        data = torch.empty(best * entry_bytes, dtype=torch.uint8, device=self.device)
        return Piece(data, entry_bytes, best, best)

    def commit(self, piece: Piece, num_entries: int) -> None:
        """Make the first `num_entries` ready, which all are."""


@dataclass(frozen=True)
class HostMemory:
    """
    Host memory, for which address space is reserved, and pages are committed as entries are written.

    So growing neither copies nor moves anything. Beyond what was reserved, and where address space is limited or the
    system reserves none, what is stored is copied to grow.

    Args:
        expected_entries: reserve address space for so many at the first entry.
        entry_tokens: tokens of an entry, 64 if it is a packed block.
        pinned_for: page-lock the memory for copies to and from this device. For CUDA chunk by chunk as it is used;
            where the system refuses, copies are slower, and one warning in the process says so. For other accelerators
            the memory is taken from torch, and what is stored is copied to grow.
        in_rows: entries lie one after the other: pages of 2 MiB are used as they fill, and page-locked.
    """

    device: ClassVar[torch.device] = torch.device("cpu")
    expected_entries: int = 0
    entry_tokens: int = 1
    pinned_for: torch.device | None = None
    in_rows: bool = True

    def ready_for(self, num_entries: int, entry_bytes: int) -> int:
        """Return the entries that can be written once the empty memory has grown to `num_entries`."""
        if locks_in_place(self.pinned_for):
            return min(self._locked(num_entries, entry_bytes), self.capacity_for(num_entries))
        return least_capacity(num_entries, self.entry_tokens)

    def capacity_for(self, num_entries: int, capacity: int = 0) -> int:
        """Return the capacity to have for `num_entries`, where it was `capacity` before."""
        return least_capacity(max(num_entries, self.expected_entries, 2 * capacity), self.entry_tokens)

    def take(self, least: int, best: int, entry_bytes: int, kept: int = 0) -> Piece:
        """
        Reserve address space for `best` entries, else for `least`, else take memory for them; none are ready.

        The first `kept` are copied to it next.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        least = least_capacity(least, self.entry_tokens)
        for capacity in [least] if address_space_is_limited() else [best, least]:
            space = self._reserve(capacity * entry_bytes)
            if space is not None:
                break
        else:
            return Piece(self._allocate(least * entry_bytes), entry_bytes, least, 0)
        if self.in_rows:
            space.use_huge_pages(0, least_capacity(kept, self.entry_tokens) * entry_bytes)
        lock = None if self.pinned_for is None else PageLock(space.data, self.pinned_for)
        return Piece(space.data, entry_bytes, capacity, 0, space, lock)

    def map_file(self, file: int, offset: int, num_entries: int, entry_bytes: int) -> Piece | None:
        """Map entries to an open file, see `TokenBuffer.map_file`; return `None` where the system cannot."""
        # Twice the space, because mapped entries would have to be read to be moved.
        capacity = self.capacity_for(num_entries if address_space_is_limited() else 2 * num_entries)
        mapped, space = least_capacity(num_entries, self.entry_tokens), self._reserve(capacity * entry_bytes)
        if space is None or not space.map_file(file, offset, mapped * entry_bytes):
            return None
        return Piece(space.data, entry_bytes, capacity, mapped, space)

    def commit(self, piece: Piece, num_entries: int) -> None:
        """Make the first `num_entries` ready, which are written next."""
        start, end, entry_bytes = piece.ready, least_capacity(num_entries, self.entry_tokens), piece.entry_bytes
        if piece.lock is not None and not piece.lock.refused:
            end = min(self._locked(num_entries, entry_bytes), piece.capacity)
        if piece.space is not None and self.in_rows:
            piece.space.use_huge_pages(start * entry_bytes, end * entry_bytes)
        if piece.lock is not None:
            piece.lock.extend(start, end, entry_bytes)
        piece.ready = piece.capacity if self._comes_locked else end

    @property
    def _comes_locked(self) -> bool:
        return self.pinned_for is not None and not locks_in_place(self.pinned_for)

    def _locked(self, num_entries: int, entry_bytes: int) -> int:
        """Return the entries to page-lock for `num_entries`: a chunk more, up to where a page and a block end."""
        page_entries = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, entry_bytes)
        granule = math.lcm(least_capacity(1, self.entry_tokens), page_entries)
        return -(-grown_capacity(num_entries, self.entry_tokens) // granule) * granule

    def _reserve(self, num_bytes: int) -> AddressSpace | None:
        is_possible = 0 < num_bytes <= _MAX_RESERVED_BYTES and not self._comes_locked
        return reserve(num_bytes) if is_possible else None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._comes_locked)
        except RuntimeError as error:  # torch has no type of its own for it
            limit = tightest_limit()
            raise HostMemoryError(
                f"The system refused {num_bytes / 2**30:.2f} GiB of host memory in one piece; {limit.free / 2**30:.2f} "
                f"GiB are free{limit.where}. Use a shorter context, a smaller batch or fewer beams."
            ) from error
