"""Stores of all tokens of a layer; each keeps them in one or more pairs of growing buffers."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch

from .growth import grown_capacity
from .host_buffer import HostBuffer
from .host_memory import HostBudget, require_host_bytes
from .kv_store import KVShape, KVStore, Pair
from .token_buffer import TokenBuffer

_MOVED_TOKENS = 4096


def repeated(states: Pair, repeats: int) -> Pair:
    """Return keys and values with each sequence `repeats` times, side by side; themselves if that is once."""
    if repeats == 1:
        return states
    keys, values = (each.repeat_interleave(repeats, dim=0) for each in states)
    return keys, values


class WholePart(NamedTuple):
    """
    All entries that a store keeps in one form, as one sequence.

    Attributes:
        num_entries: number of tokens, or of packed blocks.
        form: a store of such entries.
        is_own: whether `form` is the store that holds them.
        made: returns the store that holds them, which it puts together first if no store holds them all.
    """

    num_entries: int
    form: "BufferedStore"
    is_own: bool
    made: "Callable[[], BufferedStore]"

    @classmethod
    def own(cls, store: "BufferedStore") -> "WholePart":
        """Return all entries of `store`."""
        return cls(store.num_tokens, store, True, lambda: store)


class LocalStore(KVStore):
    """Keys and values of all tokens of one layer, which another store of the same form, or a file, can take over."""

    @property
    def num_shareable(self) -> int:
        """Number of first tokens, in whole blocks, that later tokens do not change."""
        self.take_pending()
        return self.layout.settled_tokens(self.num_tokens)

    def read_from(self, start: int) -> Pair:
        """Copy the states from token `start`, at least `num_shareable`, to memory of the compute device or the host."""
        keys, values = self.read()
        return keys[:, :, start:].clone(), values[:, :, start:].clone()

    @abstractmethod
    def whole_parts(self) -> dict[str, WholePart]:
        """Return the stored entries by name. Stores of the same states and codes have the same names."""

    @abstractmethod
    def take_parts(self, parts: "Mapping[str, BufferedStore]") -> None:
        """Store the entries of `parts` in this empty store; its own parts may be among them, already filled."""

    def take_from(self, other: KVStore) -> None:
        assert isinstance(other, LocalStore)
        self.take_parts({name: part.made() for name, part in other.whole_parts().items()})


class BufferedStore(LocalStore):
    """
    Keys and values of one layer, each in a buffer. Each place of storage has a subclass.

    An entry of the buffers is a token, or a packed block if states are packed blocks.

    Args:
        shape: of the states that are stored.
        keys: buffer of the keys.
        values: buffer of the values.
        budget: asked before host memory is used.
    """

    def __init__(self, shape: KVShape, keys: TokenBuffer, values: TokenBuffer, budget: HostBudget):
        super().__init__(shape)
        self.keys, self.values = keys, values
        self._budget = budget
        self._approved_tokens = 0

    @property
    def is_intact(self) -> bool:
        return super().is_intact and not self.keys.is_torn and not self.values.is_torn

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over the whole batch."""
        return self.keys.bytes_per_token + self.values.bytes_per_token

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.num_tokens + keys.shape[2]
        self.reserve(end)
        self.keys.write(self.num_tokens, keys)
        self.values.write(self.num_tokens, values)
        self._set_length(end)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read_range(0, self.num_tokens)

    def read_range(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of tokens `start` to `end` on their own device; call `wait_for_copies` first."""
        return self.keys.read_range(start, end), self.values.read_range(start, end)

    def whole_parts(self) -> dict[str, WholePart]:
        return {"states": WholePart.own(self)}

    def take_parts(self, parts: "Mapping[str, BufferedStore]") -> None:
        other = parts["states"]
        if other is not self:
            self.extend_from(other, 0, other.num_tokens)

    def extend_from(self, other: "BufferedStore", start: int, end: int, repeats: int = 1) -> None:
        """Store tokens `start` to `end` of another store, each sequence `repeats` times, a few thousand at a time."""
        other.wait_for_copies()
        self.reserve(self.num_tokens + end - start)
        for at in range(start, end, _MOVED_TOKENS):
            keys, values = repeated(other.read_range(at, min(at + _MOVED_TOKENS, end)), repeats)
            self.extend(keys.to(self.keys.device), values.to(self.values.device))
        self.wait_for_copies()

    def buffers(self) -> Iterable[TokenBuffer]:
        return self.keys, self.values

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        own = [self.layout.shard.tokens(length) for length in lengths]
        return ((buffer.device, buffer.planned_bytes(own)) for buffer in self.buffers())

    def truncate(self, num_tokens: int) -> None:
        self._set_length(num_tokens)

    def select_batch(self, indices: torch.Tensor) -> None:
        indices = indices.to(self.keys.device)
        with self._changing():
            self.keys = self.keys.select_batch(indices, self.num_tokens)
            self.values = self.values.select_batch(indices, self.num_tokens)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1
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
                buffer.ensure_capacity(approved, self.num_tokens)
            self._approved_tokens = approved
        self.keys.ensure(num_tokens, self.num_tokens)
        self.values.ensure(num_tokens, self.num_tokens)

    def _duplicate(self, memo: dict) -> Self:
        """Return a copy with its own buffers and budget, which `__deepcopy__` completes."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._budget = copy.deepcopy(self._budget, memo)
        twin._approved_tokens = 0
        if self.keys.device.type == "cpu":
            num_tokens = self.num_tokens * self.keys.entry_tokens
            require_host_bytes(self.num_tokens * self.bytes_per_token, f"A copy of {num_tokens:,} tokens needs")
            # The copy must not ask again for memory that it holds from the start.
            twin._approved_tokens = self.num_tokens
            twin._budget.note(twin, self.num_tokens, self.bytes_per_token)
        twin.keys = self.keys.duplicate(self.num_tokens)
        twin.values = self.values.duplicate(self.num_tokens)
        return twin
