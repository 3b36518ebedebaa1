"""Keys and values of several continuations of a prompt, which is stored once."""

from collections.abc import Iterable
from itertools import groupby
from math import gcd
from typing import Literal

import torch

from .kv_shape import Pair
from .layer_states import TokenStore
from .layout import Layout
from .memory.growth import GRANULE
from .pieces import Piece
from .runs.run import repeated
from .runs.streamed import Streamed
from .runs.token_buffer import TokenBuffer
from .store import RecentStates, Store


class SharedPrefix(TokenStore):
    """
    Groups of sequences that begin with the same tokens, with a prefix for each group and a tail for each sequence.

    Example, two prompts of 200 tokens with three continuations each:
        prefix [2, heads, 192, head_dim]   tails [6, heads, 8 and more, head_dim]

    Sequence `i` continues prefix `i // continuations`. The prefix is whole blocks, and does not change as tokens come.

    Args:
        prefix: the first tokens of all groups.
        tails: the tokens after them, of all sequences, in the order of groups.

    Attributes:
        is_staged: all states are on the device, or on their way, to be attended to there.
    """

    # Its codec is chosen before sequences share blocks, and the CPU attends to all of them or none.
    wants_queries: Literal[False] = False
    waits: Literal[False] = False
    cpu_fraction: None = None

    def __init__(self, prefix: Store, tails: Store):
        self.shape = prefix.shape._replace(batch=tails.shape.batch)
        self.prefix, self.tails = prefix, tails
        self.num_tokens = prefix.num_tokens + tails.num_tokens
        self.is_staged = False

    @classmethod
    def continuing(cls, store: Store, tails: Store) -> "SharedPrefix":
        """
        Make `store` the prefix, and let several sequences continue each of its sequences; copy its last tokens.

        Args:
            store: with whole blocks to share (`num_shareable`).
            tails: empty store for the tokens after these blocks.

        Raises:
            HostMemoryError: the host has no room for the copies; nothing has changed then.
        """
        store.settle()
        num_shared = store.num_shareable
        try:
            tails.add(*repeated(store.copy_from(num_shared), tails.shape.batch // store.shape.batch))
        except BaseException:
            tails.close()
            raise
        store.truncate(num_shared)
        return cls(store, tails)

    def settle(self) -> None:
        self.tails.settle()

    @property
    def continuations(self) -> int:
        """Number of sequences that share a prefix."""
        return self.shape.batch // self.prefix.shape.batch

    @property
    def layout(self) -> Layout:
        """Layout of the prefix."""
        return self.prefix.layout

    @property
    def streamed(self) -> Streamed | None:
        """The run of the prefix that is streamed to the device."""
        return self.prefix.streamed

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that a removal may leave, which is a block and all sinks."""
        return max(GRANULE, self.prefix.layout.sink_tokens)

    @property
    def is_intact(self) -> bool:
        """Whether both stores are whole, and hold the tokens together."""
        is_whole = not self._is_changing and self.prefix.num_tokens + self.tails.num_tokens == self.num_tokens
        return is_whole and self.prefix.is_intact and self.tails.is_intact

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, with the prefix copied for each sequence."""
        self.add(keys, values)
        return self.read()

    def add(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        """Store new states in the tails, see `Store`."""
        self.is_staged, streamed = on_device, self.streamed
        if on_device and streamed is not None and self.prefix.is_in_one_run:
            streamed.write(*streamed.read_range(0, 0), on_device)
        self.tails.add(keys, values, on_device)
        self._set_length(self.prefix.num_tokens + self.tails.num_tokens)

    def read(self) -> Pair:
        """Return all keys and values, on the compute device."""
        pairs = zip(self.read_prefix(self.prefix.num_tokens), self.tails.read(), strict=True)
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        return keys, values

    def read_copy(self) -> Pair:
        """Return all keys and values, in memory that is not the store's."""
        return self.read()

    def read_prefix(self, num_tokens: int) -> Pair:
        """Return the first tokens of all sequences, at most those of the prefix."""
        keys, values = self.prefix.read()
        return repeated((keys[:, :, :num_tokens], values[:, :, :num_tokens]), self.continuations)

    def recent_states(self) -> RecentStates:
        """Copy the states of all sequences that later tokens would quantize."""
        recent = self.tails.recent_states()
        return recent._replace(start=self.prefix.num_tokens + recent.start, host_tokens=None)

    def extend_recent(self, recent: RecentStates) -> None:
        """Store recent states again after the tokens that were before them."""
        self.add(*recent.states)

    def pieces(self, part: str) -> list[Piece]:
        prefix = (each._replace(repeats=self.continuations) for each in self.prefix.pieces(part))
        return [*prefix, *self.tails.pieces(part)]

    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""
        return *self.prefix.buffers(), *self.tails.buffers()

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`, at least `least_tokens`."""
        left = num_tokens - self.prefix.num_tokens
        if left >= 0:
            self.tails.truncate(left)
        else:
            with self._changing():
                self.tails.truncate(0)
                self.prefix.truncate(num_tokens)
                # Blocks are counted from the first token, so a block that was cut goes on in the tails.
                whole = self.prefix.num_shareable
                rest = self.prefix.copy_from(whole)
                self.prefix.truncate(whole)
                self.tails.add(*repeated(rest, self.continuations))
        self._set_length(num_tokens)

    def _prefixes_of(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the prefixes of the sequences `indices`, one for each new group; `None` if they stay as they are."""
        groups = [index // self.continuations for index in indices.tolist()]
        each, rest = divmod(len(groups), self.prefix.shape.batch)
        if not rest and groups == [index // each for index in range(len(groups))]:
            return None
        run = gcd(*(len(list(same)) for _, same in groupby(groups)))
        return torch.tensor(groups[::run])

    def select(self, indices: torch.Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        prefixes = self._prefixes_of(indices)
        with self._changing():
            self.tails.select(indices)
            if prefixes is not None:
                self.prefix.select(prefixes)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def wait_for_copies(self) -> None:
        """Block the calling thread until all copies are done, see `Store`."""
        self.prefix.wait_for_copies()
        self.tails.wait_for_copies()

    def close(self) -> None:
        """Give back memory that is shared with other layers. The store must not be used afterwards."""
        self.version += 1
        self.prefix.close()
        self.tails.close()


# What a layer keeps its states in.
AnyStore = Store | SharedPrefix
