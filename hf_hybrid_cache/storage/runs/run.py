"""Runs of a layer: some of its keys and values, one after the other in one place and form, in two growing buffers."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch

from ..kv_shape import KVShape, Pair
from ..memory.buffer_memory import DeviceMemory, HostMemory
from ..memory.growth import GRANULE, InitialCapacity, grown_capacity
from ..memory.host_memory import HostBudget, require_host_bytes
from .block_buffer import BlockBuffer
from .token_buffer import TokenBuffer

_MOVED_TOKENS = 4096


def repeated(states: Pair, repeats: int) -> Pair:
    """Return keys and values with each sequence `repeats` times, side by side; themselves if that is once."""
    if repeats == 1:
        return states
    keys, values = (each.repeat_interleave(repeats, dim=0) for each in states)
    return keys, values


class Run:
    """
    Some keys and values of one layer, one after the other. Each place has a subclass; no run knows another.

    An entry of the buffers is a token, or a packed block if states are packed blocks.

    Args:
        budget: asked before host memory is used.

    Attributes:
        num_entries: entries that are stored.
        is_intact: no change in place has ended half-way.
    """

    def __init__(self, shape: KVShape, keys: TokenBuffer, values: TokenBuffer, budget: HostBudget):
        self.shape = shape
        self.keys, self.values = keys, values
        self.num_entries = 0
        self.is_intact = True
        self._budget = budget
        self._room = 0  # entries that can be written as it is

    def __deepcopy__(self, memo: dict) -> Self:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._budget = copy.deepcopy(self._budget, memo)
        twin._room = 0
        if self.keys.device.type == "cpu":
            num_tokens = self.num_entries * self.keys.entry_tokens
            require_host_bytes(self.num_entries * self.bytes_per_token, f"A copy of {num_tokens:,} tokens needs")
            # The copy must not ask again for memory that it holds from the start.
            twin._budget.note(twin, self.num_entries, self.bytes_per_token)
        twin.keys = self.keys.duplicate(self.num_entries)
        twin.values = self.values.duplicate(self.num_entries)
        return twin

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one entry, over the whole batch."""
        return self.keys.bytes_per_token + self.values.bytes_per_token

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """
        Store new entries, `[batch, num_kv_heads, new_entries, dim]`, after the others.

        With `on_device` the run is used on the device next, which matters where it is streamed.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """
        end = self.num_entries + keys.shape[2]
        if end > self._room:
            self.reserve(end)
        self.keys.write(self.num_entries, keys)
        self.values.write(self.num_entries, values)
        self.num_entries = end

    @property
    def num_free(self) -> int:
        """Number of entries that can be written without a change of memory."""
        return self._room - self.num_entries

    def read(self, start: int = 0, end: int | None = None) -> Pair:
        """Return entries `start` to `end`, or all, on the compute device."""
        end = self.num_entries if end is None else end
        return self.keys.read_range(start, end), self.values.read_range(start, end)

    def read_range(self, start: int, end: int) -> Pair:
        """Return entries `start` to `end` on their own device; call `wait_for_copies` first."""
        return self.keys.read_range(start, end), self.values.read_range(start, end)

    def extend_from(self, other: "Run", start: int, end: int, repeats: int = 1) -> None:
        """Store entries `start` to `end` of another run in pieces, each sequence `repeats` times."""
        other.wait_for_copies()
        self.reserve(self.num_entries + end - start)
        for at in range(start, end, _MOVED_TOKENS):
            keys, values = repeated(other.read_range(at, min(at + _MOVED_TOKENS, end)), repeats)
            self.write(keys.to(self.keys.device), values.to(self.values.device))
        self.wait_for_copies()

    def reserve(self, num_entries: int) -> None:
        """
        Have memory for `num_entries` in all; ask for host memory a chunk ahead.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """
        if num_entries <= self._room:
            return
        buffers, is_on_host = self.buffers(), self.keys.device.type == "cpu"
        granted = self._budget.granted(self)
        if is_on_host and num_entries > granted:
            ahead = grown_capacity(num_entries, self.keys.entry_tokens)
            moved = max(buffer.num_bytes if ahead > buffer.capacity else 0 for buffer in buffers)
            granted = self._budget.grow(self, num_entries, self.bytes_per_token, moved)
        for buffer in buffers:
            buffer.ensure(num_entries, self.num_entries, granted)
        ready = min(buffer.held.ready for buffer in buffers)
        self._room = min(ready, granted) if is_on_host else ready

    def truncate(self, num_entries: int) -> None:
        """Keep the first `num_entries`."""
        self.num_entries = num_entries

    def select(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        indices = indices.to(self.keys.device)
        with self._changing():
            self._room = 0
            self.keys = self.keys.select(indices, self.num_entries)
            self.values = self.values.select(indices, self.num_entries)
            self.shape = self.shape._replace(batch=len(indices))
            self._budget.note(self, self._budget.granted(self), self.bytes_per_token)

    def buffers(self) -> tuple[TokenBuffer, TokenBuffer]:
        """Return the buffers of keys and of values."""
        return self.keys, self.values

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty run had grown to each of `lengths`."""
        return ((buffer.device, buffer.planned_bytes(lengths)) for buffer in self.buffers())

    def wait_for_copies(self) -> None:
        """Block the calling thread until no copy reads or writes the stored states, and all of them are there."""

    def wait_until_stored(self) -> None:
        """Block the calling thread until all stored states are there; copies may still read them."""

    def close(self) -> None:
        """Give back memory that is shared with other layers. The run must not be used afterwards."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the run as not whole if the change inside ends half-way."""
        self.is_intact = False
        yield
        self.is_intact = True


class Resident(Run):
    """
    Keys and values on the compute device, in the layout that attention reads.

    On the CPU growing costs nothing. On an accelerator it copies one tensor of one layer, once in thousands of tokens,
    and never up to `capacity.device_tokens`.

    Args:
        capacity: of the buffers before the first token.
        packed: states are packed blocks, one after the other.
    """

    def __init__(self, shape: KVShape, capacity: InitialCapacity, budget: HostBudget, packed: bool = False):
        entry_tokens = GRANULE if packed else 1
        memory: DeviceMemory | HostMemory = DeviceMemory(shape.device, capacity.device_tokens, entry_tokens)
        if shape.device.type == "cpu":
            memory = HostMemory(capacity.host_tokens, entry_tokens, in_rows=packed)
        keys = TokenBuffer(shape.keys, shape.key_dtype, memory, token_major=packed)
        values = TokenBuffer(shape.values, shape.value_dtype, memory, token_major=packed)
        super().__init__(shape, keys, values, budget)

    @property
    def capacity(self) -> int:
        """Number of tokens that there is memory for."""
        return min(self.keys.capacity, self.values.capacity)

    def remove(self, start: int, end: int) -> None:
        """Remove tokens `start` to `end` and move later ones into their places, in pieces that do not overlap."""
        count = end - start
        self.leave_to_holders(self.num_entries)
        with self._changing():
            for at in range(end, self.num_entries, count):
                keys, values = self.read_range(at, min(at + count, self.num_entries))
                self.keys.write(at - count, keys)
                self.values.write(at - count, values)
            self.num_entries -= count

    def truncate(self, num_entries: int) -> None:
        if num_entries < self.num_entries:
            self.leave_to_holders(num_entries)
        super().truncate(num_entries)

    def leave_to_holders(self, keep: int) -> None:
        """Move to other memory, with the first `keep` entries, if somebody holds what was read."""
        for buffer in self.buffers():
            buffer.leave_to_holders(keep)


class HostBlocks(Run):
    """
    Keys and values in host memory, in the blocks that the kernels read, for attention on the CPU.

    Args:
        capacity: of the buffers before the first token.
        packed: states are packed blocks.
        pinned_for: page-lock the memory for copies to and from this device.
    """

    def __init__(
        self,
        shape: KVShape,
        capacity: InitialCapacity,
        budget: HostBudget,
        packed: bool = False,
        pinned_for: torch.device | None = None,
    ):
        memory = HostMemory(capacity.host_tokens, GRANULE if packed else 1, pinned_for)
        if packed:
            keys = TokenBuffer(shape.keys, shape.key_dtype, memory, token_major=True)
            values = TokenBuffer(shape.values, shape.value_dtype, memory, token_major=True)
        else:
            keys = BlockBuffer(shape.keys, shape.key_dtype, memory, transposed=True)
            values = BlockBuffer(shape.values, shape.value_dtype, memory, transposed=False)
        super().__init__(shape, keys, values, budget)

    @classmethod
    def like(cls, run: Run, num_entries: int = 0, repeats: int = 1) -> "HostBlocks":
        """Make an empty run for the entries of `run`, or for `num_entries`, of each sequence `repeats` times."""
        entry_tokens = run.keys.entry_tokens
        shape = run.shape._replace(batch=run.shape.batch * repeats, device=torch.device("cpu"))
        capacity = InitialCapacity(0, max(num_entries, run.num_entries))
        return HostBlocks(shape, capacity, HostBudget(1, entry_tokens), entry_tokens == GRANULE)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values as kernels read them, see `BlockBuffer`; call `wait_until_stored` first."""
        return self.keys.held.array, self.values.held.array

    def rows(self) -> Pair:
        """Return writable views of keys and values in whole rows, as they are stored; call `wait_for_copies` first."""
        return self.keys.stored_rows(self.num_entries), self.values.stored_rows(self.num_entries)

    def clear_rest(self) -> None:
        """Zero the last row after the last entry, where removed tokens may be."""
        for buffer in self.buffers():
            buffer.clear_rest(self.num_entries)

    def make_rows(self, num_entries: int) -> None:
        """
        Make rows with any content for so many entries, which count as stored from then on.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """
        self.reserve(num_entries)
        self.num_entries = num_entries

    def map_rows(self, file: int, offsets: tuple[int, int], num_entries: int) -> bool:
        """
        Map the rows of keys and values to an open file, from `offsets` on; the entries count as stored then.

        Returns:
            False where the system cannot do that; use `make_rows` then.
        """
        pairs = zip(self.buffers(), offsets, strict=True)
        if not all(buffer.map_file(file, offset, num_entries) for buffer, offset in pairs):
            return False
        # The budget is not asked: the pages are those of the file until they are written to.
        self._budget.note(self, num_entries, self.bytes_per_token)
        self.num_entries = num_entries
        return True
