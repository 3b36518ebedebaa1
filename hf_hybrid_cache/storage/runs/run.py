"""A segment of a layer: some of its keys and values in one place and one form, in a pair of growing buffers."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from ..buffers.host_buffer import HostBuffer
from ..buffers.token_buffer import TokenBuffer
from ..kv_store import KVShape, Pair
from ..memory.growth import grown_capacity
from ..memory.host_memory import HostBudget, require_host_bytes

_MOVED_TOKENS = 4096


def repeated(states: Pair, repeats: int) -> Pair:
    """Return keys and values with each sequence `repeats` times, side by side; themselves if that is once."""
    if repeats == 1:
        return states
    keys, values = (each.repeat_interleave(repeats, dim=0) for each in states)
    return keys, values


class Run(ABC):
    """
    Some keys and values of one layer, one after the other. Each place has a subclass; no segment knows another.

    An entry of the buffers is a token, or a packed block if states are packed blocks.

    Args:
        shape: of the states that are stored.
        keys: buffer of the keys.
        values: buffer of the values.
        budget: asked before host memory is used.

    Attributes:
        num_entries: entries that are stored.
    """

    def __init__(self, shape: KVShape, keys: TokenBuffer, values: TokenBuffer, budget: HostBudget):
        self.shape = shape
        self.num_entries = 0
        self._is_changing = False
        self.keys, self.values = keys, values
        self._budget = budget
        self._approved_tokens = 0

    @property
    def is_intact(self) -> bool:
        return not (self._is_changing or self.keys.is_torn or self.values.is_torn)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over the whole batch."""
        return self.keys.bytes_per_token + self.values.bytes_per_token

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new entries and return all, on the compute device."""

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.num_entries + keys.shape[2]
        self.reserve(end)
        self.keys.write(self.num_entries, keys)
        self.values.write(self.num_entries, values)
        self._set_length(end)

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new entries, and start the copies of `staged_range` to the device, without waiting for them."""
        self.write(keys, values)

    def staged_range(self) -> tuple[int, int]:
        """Return the first entry that is used on the device now, and the one after the last."""
        return 0, self.num_entries

    def read_staged(self) -> Pair:
        """Return the entries of `staged_range`, on the device; call it once for each `stage`."""
        return self.read()

    def read(self) -> Pair:
        return self.read_range(0, self.num_entries)

    def read_range(self, start: int, end: int) -> Pair:
        """Return entries `start` to `end` on their own device; call `wait_for_copies` first."""
        return self.keys.read_range(start, end), self.values.read_range(start, end)

    def extend_from(self, other: "Run", start: int, end: int, repeats: int = 1) -> None:
        """Store entries `start` to `end` of another segment in pieces, each sequence `repeats` times."""
        other.wait_for_copies()
        self.reserve(self.num_entries + end - start)
        for at in range(start, end, _MOVED_TOKENS):
            keys, values = repeated(other.read_range(at, min(at + _MOVED_TOKENS, end)), repeats)
            self.write(keys.to(self.keys.device), values.to(self.values.device))
        self.wait_for_copies()

    def buffers(self) -> Iterable[TokenBuffer]:
        return self.keys, self.values

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        """Return the device and bytes of each buffer after this empty segment had grown to each of `lengths`."""
        return ((buffer.device, buffer.planned_bytes(lengths)) for buffer in self.buffers())

    def make_rows(self, num_entries: int) -> None:
        """
        Make rows with any content for so many entries, which count as stored from then on.

        Raises:
            HostMemoryError: the host has no capacity for them; nothing has changed then.
        """
        self.reserve(num_entries)
        self._set_length(num_entries)

    def truncate(self, num_tokens: int) -> None:
        self._set_length(num_tokens)

    def select(self, indices: torch.Tensor) -> None:
        indices = indices.to(self.keys.device)
        with self._changing():
            self.keys = self.keys.select(indices, self.num_entries)
            self.values = self.values.select(indices, self.num_entries)
            self.shape = self.shape._replace(batch=len(indices))
            self._budget.note(self, self._approved_tokens, self.bytes_per_token)

    def reserve(self, num_tokens: int) -> None:
        """
        Grow the capacity to at least `num_tokens` in all; ask for host memory a chunk ahead.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """
        if num_tokens > self._approved_tokens and self.keys.device.type == "cpu":
            buffers = [buffer for buffer in self.buffers() if isinstance(buffer, HostBuffer)]
            ahead = grown_capacity(num_tokens, self.keys.entry_tokens)
            moved = max(buffer.moved_bytes(ahead) for buffer in buffers)
            approved = self._budget.grow(self, num_tokens, self.bytes_per_token, moved)
            for buffer in buffers:
                buffer.ensure_capacity(approved, self.num_entries)
            self._approved_tokens = approved
        self.keys.ensure(num_tokens, self.num_entries)
        self.values.ensure(num_tokens, self.num_entries)

    def wait_for_copies(self) -> None:  # noqa: B027
        """Block the calling thread until no copy reads or writes the stored states, and all of them are there."""

    def wait_until_stored(self) -> None:
        """Block the calling thread until all stored states are there; copies may still read them."""
        self.wait_for_copies()

    def close(self) -> None:  # noqa: B027
        """Give back memory that is shared with other layers. The run must not be used afterwards."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the run as not whole if the change inside ends half-way."""
        self._is_changing = True
        yield
        self._is_changing = False

    def _set_length(self, num_entries: int) -> None:
        self.num_entries = num_entries

    def _duplicate(self, memo: dict) -> Self:
        """Return a copy with its own buffers and budget, which `__deepcopy__` completes."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._budget = copy.deepcopy(self._budget, memo)
        twin._approved_tokens = 0
        if self.keys.device.type == "cpu":
            num_tokens = self.num_entries * self.keys.entry_tokens
            require_host_bytes(self.num_entries * self.bytes_per_token, f"A copy of {num_tokens:,} tokens needs")
            # The copy must not ask again for memory that it holds from the start.
            twin._approved_tokens = self.num_entries
            twin._budget.note(twin, self.num_entries, self.bytes_per_token)
        twin.keys = self.keys.duplicate(self.num_entries)
        twin.values = self.values.duplicate(self.num_entries)
        return twin
