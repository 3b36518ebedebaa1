"""Host memory in contiguous rows, which kernels read, and copies to and from a device move."""

import itertools
import math
import mmap
from collections.abc import Iterable

import torch

from ..memory.address_space import AddressSpace
from ..memory.growth import grown_capacity
from ..memory.memory_limits import address_space_is_limited
from ..memory.page_lock import PageLock, locks_in_place
from .host_buffer import HostBuffer


class RunBuffer(HostBuffer):
    """
    States of one layer in contiguous rows, in pages of 2 MiB, page-locked if asked for.

    Args:
        shape: see `TokenBuffer`.
        dtype: see `TokenBuffer`.
        token_major: see `TokenBuffer`.
        expected_tokens: reserve address space for this many.
        entry_tokens: see `TokenBuffer`.
        pinned_for: page-lock the memory for copies to and from this device. For CUDA chunk by chunk as it is used;
            where the system refuses, copies are slower, and one warning in the process says so. For other accelerators
            the memory is taken from torch, and what is stored is copied when it grows.

    Attributes:
        row_entries: entries in one row; the unit of copies to and from a device.
    """

    row_entries = 1
    is_lent = False  # states are copied out of rows

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        token_major: bool = True,
        expected_tokens: int = 0,
        entry_tokens: int = 1,
        pinned_for: torch.device | None = None,
    ):
        self.pinned_for = pinned_for
        self._takes_locked = pinned_for is not None and not locks_in_place(pinned_for)
        super().__init__(shape, dtype, token_major, expected_tokens, entry_tokens)

    @property
    def capacity(self) -> int:
        return self._data.shape[0] * self.row_entries

    def rows(self, num_entries: int) -> int:
        """Return the number of rows that hold this many entries."""
        return -(-num_entries // self.row_entries)

    def stored_shape(self, num_entries: int) -> torch.Size:
        """Return the shape of the rows that hold this many entries."""
        return self._stored_shape(num_entries)

    def stored_rows(self, num_entries: int) -> torch.Tensor:
        """Return a writable view of the rows that hold this many entries, one piece of memory."""
        return self._data[: self.rows(num_entries)]

    def clear_rest(self, num_entries: int) -> None:
        """Zero the last row that holds one of this many entries after the last one."""

    def map_file(self, file: int, offset: int, num_entries: int, in_part: bool = False) -> bool:
        """
        Map the rows of an empty buffer to an open file, from `offset` on; the file is never written to.

        With `in_part` only parts are read: the system is told not to read ahead.
        Further entries, and entries of the file once they are written to, are in memory.

        Returns:
            False where the system cannot do that; nothing has changed then.
        """
        # Twice the space, because mapped rows would have to be read to be moved.
        room = num_entries if address_space_is_limited() else 2 * num_entries
        reserved = max(room, self.expected_tokens)
        space = self._reserve(reserved)
        num_rows = self.rows(num_entries)
        num_bytes = num_rows * self.row_entries * self.bytes_per_token
        if space is None or not space.map_file(file, offset, num_bytes, in_part):
            return False
        self.pinned_for = None  # locked pages would be copies
        self._space = space
        with torch.inference_mode(False):
            self._adopt(space.data.view(self.dtype).view(self._stored_shape(reserved)))
        self._committed_tokens = num_rows * self.row_entries
        return True

    def duplicate(self, num_tokens: int) -> "RunBuffer":
        twin = self._emptied(self.shape)
        twin.ensure(num_tokens, keep=0)
        rows = self.rows(num_tokens)
        twin._data[:rows] = self._data[:rows]
        return twin

    def _copies(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Split rows `first` to `last` into those that one copy can move, where page-locked ranges meet."""
        cuts = {row for cut in self._lock.cuts if first < (row := cut // self.row_entries) < last}
        return itertools.pairwise(sorted({first, *cuts, last}))

    def _grow(self, num_tokens: int, keep: int) -> None:
        release_old = self._lock.release
        super()._grow(num_tokens, keep)
        release_old()

    def _reserve(self, num_tokens: int) -> AddressSpace | None:
        return None if self._takes_locked else super()._reserve(num_tokens)

    def _prepare(self, space: AddressSpace, num_tokens: int) -> None:
        space.use_huge_pages(0, self.rows(num_tokens) * self.row_entries * self.bytes_per_token)

    def _memory_for(self, num_tokens: int) -> int:
        if not locks_in_place(self.pinned_for):
            return self.rows(num_tokens) * self.row_entries
        reserved = self.rows(max(num_tokens, self.expected_tokens)) * self.row_entries
        return min(self._locked(num_tokens), reserved)

    def _locked(self, num_tokens: int) -> int:
        """Return the entries to page-lock for `num_tokens`: a chunk more, up to where a page and a row end."""
        page_entries = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self.bytes_per_token)
        granule = math.lcm(self.row_entries, page_entries)
        return -(-grown_capacity(num_tokens, self.entry_tokens) // granule) * granule

    def _commit(self, num_tokens: int) -> None:
        start, end = self._committed_tokens, self.rows(num_tokens) * self.row_entries
        # Memory that was not reserved does not start at a page, and might share one with other memory.
        if self.pinned_for is not None and self._space is not None and not self._lock.refused:
            end = min(self._locked(num_tokens), self.capacity)
        if self._space is not None:
            self._space.use_huge_pages(start * self.bytes_per_token, end * self.bytes_per_token)
            if self.pinned_for is not None:
                self._lock.extend(start, end, self.bytes_per_token)
        if self._takes_locked:
            end = self.capacity
        self._committed_tokens = end

    def _move_to(self, data: torch.Tensor, keep: int) -> None:
        rows = self.rows(keep)
        data[:rows] = self._data[:rows]
        self._exchange(data)

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._lock = PageLock(data, self.pinned_for)
