"""Memory for the keys, or the values, of one layer: tokens one after the other, read as one tensor."""

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Self

import torch

from ..memory.buffer_memory import DeviceMemory, HostMemory, Piece, StorageUses
from ..memory.host_memory import require_host_bytes

_PIECE_BYTES = 32 * 2**20


class TokenBuffer:
    """
    States of one layer in one memory, an entry after the other. An entry is a token, or a packed block.

    The buffer does not know how many of its entries are valid: its owner says so in every call.

    Args:
        shape: `(batch, num_kv_heads, head_dim)`.
        dtype: type of the stored states.
        memory: where they are, and how it grows.
        token_major: store as `[tokens, batch, heads, head_dim]`, so that any run of tokens is contiguous (for copies
            between devices), instead of `[batch, heads, tokens, head_dim]` (for attention).

    Attributes:
        entry_tokens: tokens that one entry stands for; 64 if an entry is a packed block.
        row_entries: entries in one row; the unit of copies to and from a device.
        held: the memory now.
        bytes_per_token: bytes of an entry.
    """

    row_entries = 1

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        memory: DeviceMemory | HostMemory,
        token_major: bool = False,
    ):
        self.shape, self.dtype, self.memory, self.token_major = shape, dtype, memory, token_major
        self.device, self.entry_tokens = memory.device, memory.entry_tokens
        self._take(0, 0)

    @property
    def capacity(self) -> int:
        """Number of entries that can be written without moving others."""
        return self.held.capacity

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that hold, or held, entries, without reserved address space."""
        return self.held.ready * self.bytes_per_token

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds a tensor in this memory, such as a slice of what was read."""
        return self.held.uses.is_shared

    def rows(self, num_entries: int) -> int:
        """Return the number of rows that hold this many entries."""
        return -(-num_entries // self.row_entries)

    def stored_shape(self, num_entries: int) -> torch.Size:
        """Return the shape of the rows that hold this many entries."""
        batch, heads, head_dim = self.shape
        if self.token_major:
            return torch.Size((num_entries, batch, heads, head_dim))
        return torch.Size((batch, heads, num_entries, head_dim))

    def stored_rows(self, num_entries: int) -> torch.Tensor:
        """Return a writable view of the rows that hold this many entries; if token-major, one piece of memory."""
        return self._rows_of(self.held, 0, self.rows(num_entries))

    def ensure(self, num_entries: int, keep: int, ahead: int = 0) -> None:
        """
        Have memory for at least `num_entries`, and capacity for `ahead` or more; keep the first `keep`.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        capacity = max(num_entries, ahead)
        if capacity > self.capacity:
            self._take(capacity, self.memory.capacity_for(capacity, self.capacity), keep)
        if num_entries > self.held.ready:
            self.memory.commit(self.held, num_entries)

    def planned_bytes(self, sizes: Iterable[int]) -> int:
        """Return the bytes that the empty buffer would hold after growing to each of `sizes`; nothing is allocated."""
        ready = 0
        for num_entries in sizes:
            if num_entries > ready:
                ready = self.memory.ready_for(num_entries, self.bytes_per_token)
        return ready * self.bytes_per_token

    def leave_to_holders(self, keep: int) -> None:
        """Move to other memory, with the first `keep` entries, if somebody holds a tensor in this one."""
        if not self.is_lent:
            return
        if self.device.type == "cpu":
            purpose = f"To keep {keep:,} tokens beside states that are held needs"
            require_host_bytes(keep * self.bytes_per_token, purpose)
        ready = self.held.ready
        self._take(ready, self.capacity, keep)
        self.memory.commit(self.held, ready)

    def write(self, start: int, states: torch.Tensor) -> None:
        """Store `states`, `[batch, heads, entries, head_dim]`, from entry `start` on; call `ensure` first."""
        self.held.seen.narrow(2, start, states.shape[2]).copy_(states)

    def read_range(self, start: int, end: int) -> torch.Tensor:
        """Return entries `start` to `end`, `[batch, heads, end - start, head_dim]`; a view if the layout allows one."""
        return self.held.seen.narrow(2, start, end - start)

    def clear_rest(self, num_entries: int) -> None:
        """Zero the last row that holds one of this many entries after the last one."""

    def load(self, target: "TokenBuffer", start: int, end: int) -> None:
        """Copy entries `start`, the first of a row, to `end` to the start of a buffer on a device."""
        for first, last in self._copies(start, end):
            there = target.read_range(first - start, last - start)
            there.copy_(self.read_range(first, last), non_blocking=True)

    def save(self, source: "TokenBuffer", start: int, end: int, first_there: int = 0) -> None:
        """Copy the rows with entries `start` to `end` from a buffer on a device that begins with `first_there`."""
        for first, last in self._copies(start, end):
            there = source.read_range(first - first_there, last - first_there)
            self.read_range(first, last).copy_(there, non_blocking=True)

    def map_file(self, file: int, offset: int, num_entries: int) -> bool:
        """
        Map the rows of an empty buffer in host memory to an open file, from `offset` on; the file is not written to.

        Further entries, and entries of the file once they are written to, are in memory.

        Returns:
            False where the system cannot do that; nothing has changed then.
        """
        assert isinstance(self.memory, HostMemory)
        with torch.inference_mode(False):
            piece = self.memory.map_file(file, offset, num_entries, self.bytes_per_token)
            if piece is None:
                return False
            self.memory = replace(self.memory, pinned_for=None)  # locked pages would be copies
            self._view(piece)
            self.held = piece
        return True

    def select(self, indices: torch.Tensor, num_entries: int) -> Self:
        """
        Return a buffer of the first `num_entries`, whose sequence `i` is sequence `indices[i]` of this one.

        It works in place, a few MiB at a time, if the batch size stays and nobody holds a tensor in this memory. This
        buffer must not be used afterwards.
        """
        target = self
        if len(indices) != self.shape[0] or self.is_lent:
            target = self._emptied(len(indices), num_entries)
        for first, last, _ in self._pieces(0, num_entries):
            piece = self._rows_of(self.held, first, last).index_select(1 if self.token_major else 0, indices)
            target._rows_of(target.held, first, last).copy_(piece)
        return target

    def duplicate(self, num_entries: int) -> Self:
        """Return an independent copy of the first `num_entries`."""
        twin = self._emptied(self.shape[0], num_entries)
        twin.stored_rows(num_entries).copy_(self.stored_rows(num_entries))
        return twin

    def _emptied(self, batch: int, num_entries: int) -> Self:
        """Return a buffer like this one with memory for entries that are to be written."""
        twin = copy.copy(self)
        twin.shape = (batch, *self.shape[1:])
        twin._take(0, 0)
        twin.ensure(num_entries, keep=0)
        return twin

    def _take(self, least: int, best: int, keep: int = 0) -> None:
        """Move the first `keep` entries to other memory, and only then give up the memory that held them."""
        row = self.stored_shape(self.row_entries)
        self.bytes_per_token = row.numel() * self.dtype.itemsize // self.row_entries
        # Inference tensors could not be written to outside inference mode later on.
        with torch.inference_mode(False):
            piece = self.memory.take(least, best, self.bytes_per_token, keep)
            self._view(piece)
            if keep:
                rows = self.rows(keep)
                self._rows_of(piece, 0, rows).copy_(self._rows_of(self.held, 0, rows))
        self.held = piece

    def _view(self, piece: Piece) -> None:
        """Make the views of a piece, which becomes that of the buffer by one assignment afterwards."""
        piece.stored = piece.data.view(self.dtype).view(self.stored_shape(piece.capacity))
        piece.seen = piece.stored.permute(1, 2, 0, 3) if self.token_major else piece.stored
        if self.dtype == torch.uint8 and isinstance(self.memory, HostMemory):
            piece.array = piece.stored.flatten(1, 2).numpy()
        piece.uses = StorageUses(piece.data)

    def _rows_of(self, piece: Piece, first: int, last: int) -> torch.Tensor:
        return piece.stored.narrow(0 if self.token_major else 2, first, last - first)

    def _pieces(self, start: int, end: int) -> Sequence[tuple[int, int, Iterable[tuple[int, int]]]]:
        """Split the rows of entries `start` to `end` into pieces of some MiB, with the copies that move each."""
        first, last = start // self.row_entries, -(-end // self.row_entries)
        most = max(1, _PIECE_BYTES // max(1, self.row_entries * self.bytes_per_token))
        if last - first <= most and self.held.lock is None:  # a decode step
            return ((first, last, ((first, last),)),)
        borders = [*range(first, last, most), last]
        return [(*rows, self._copies(*rows)) for rows in itertools.pairwise(borders)]

    def _copies(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Split rows `first` to `last` into those that one copy can move, where page-locked ranges meet."""
        lock = self.held.lock
        if lock is None or not lock.cuts:
            return ((first, last),)
        cuts = (cut // self.row_entries for cut in lock.cuts)
        return itertools.pairwise(sorted({first, *(cut for cut in cuts if first < cut < last), last}))
