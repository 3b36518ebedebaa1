"""Keys and values of several continuations of a prompt, which is stored once."""

import copy
from collections.abc import Iterable
from itertools import groupby
from math import gcd
from typing import Literal

import torch

from .buffers.token_buffer import TokenBuffer
from .kv_store import KVStore, Pair
from .layer_reading import copy_from
from .layout import Layout
from .memory.growth import GRANULE
from .part import Part
from .recent_states import RecentStates
from .runs.run import repeated
from .runs.streamed import Streamed
from .store import Store


class SharedPrefix(KVStore):
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

    is_continued: Literal[True] = True
    # Its codec is chosen before sequences share blocks.
    wants_queries: Literal[False] = False
    pending_bytes = 0

    def __init__(self, prefix: Store, tails: Store):
        super().__init__(prefix.shape._replace(batch=tails.shape.batch))
        self.prefix, self.tails = prefix, tails
        self.is_staged = False
        self._set_length(prefix.num_tokens + tails.num_tokens)

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
            tails.extend(*repeated(copy_from(store, num_shared), tails.shape.batch // store.shape.batch))
        except BaseException:
            tails.close()
            raise
        store.truncate(num_shared)
        return cls(store, tails)

    def __deepcopy__(self, memo: dict) -> "SharedPrefix":
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.prefix, twin.tails = copy.deepcopy(self.prefix, memo), copy.deepcopy(self.tails, memo)
        return twin

    @property
    def pending(self) -> tuple[Pair, ...]:
        """The pending states of the tails, in pieces."""
        return self.tails.pending

    def settle(self) -> None:
        """Store the pending states, see `Store`."""
        self.tails.settle()

    @property
    def continuations(self) -> int:
        """Number of sequences that share a prefix."""
        return self.shape.batch // self.prefix.shape.batch

    @property
    def indexed(self) -> Store:
        """The store whose keys a key index covers."""
        return self.prefix

    @property
    def layout(self) -> Layout:
        """Layout of the prefix."""
        return self.prefix.layout

    @property
    def cpu_fraction(self) -> None:
        """The CPU attends to all or nothing."""

    @property
    def streamed(self) -> Streamed | None:
        """The segment of the prefix that is streamed to the device."""
        return self.prefix.streamed

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that a removal may leave, which is a block and all sinks."""
        return max(GRANULE, self.prefix.layout.sink_tokens)

    @property
    def is_intact(self) -> bool:
        whole = self.prefix.num_tokens + self.tails.num_tokens == self.num_tokens
        return super().is_intact and self.prefix.is_intact and self.tails.is_intact and whole

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, with the prefix copied for each sequence."""
        self.extend(keys, values)
        return self.read()

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states, and start the copies of states in host memory to the device."""
        self.is_staged = True
        if self.prefix.has_one_segment and self.prefix.streamed is not None:
            self.prefix.stage(keys[: self.prefix.shape.batch, :, :0], values[: self.prefix.shape.batch, :, :0])
        self.tails.append(keys, values)
        self._set_length(self.prefix.num_tokens + self.tails.num_tokens)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.is_staged = False
        self.tails.extend(keys, values)
        self._set_length(self.prefix.num_tokens + self.tails.num_tokens)

    def read(self) -> Pair:
        pairs = zip(self.read_prefix(self.prefix.num_tokens), self.tails.read(), strict=True)
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        return keys, values

    def read_copy(self) -> Pair:
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
        self.extend(*recent.states)

    def parts(self) -> dict[str, Part]:
        """Return the entries of all sequences by name, with those of the prefix repeated for each sequence."""
        tails = self.tails.parts()
        return {
            name: Part(tails[name].form, (*shared.repeated(self.continuations).runs, *tails[name].runs))
            for name, shared in self.prefix.parts().items()
        }

    def buffers(self) -> Iterable[TokenBuffer]:
        return *self.prefix.buffers(), *self.tails.buffers()

    def truncate(self, num_tokens: int) -> None:
        left = num_tokens - self.prefix.num_tokens
        if left >= 0:
            self.tails.truncate(left)
        else:
            with self._changing():
                self.tails.truncate(0)
                self.prefix.truncate(num_tokens)
                # Blocks are counted from the first token, so a block that was cut goes on in the tails.
                whole = self.prefix.num_shareable
                rest = copy_from(self.prefix, whole)
                self.prefix.truncate(whole)
                self.tails.extend(*repeated(rest, self.continuations))
        self._set_length(num_tokens)

    def indices_of_indexed(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the prefixes of the sequences `indices`, one for each new group; `None` if they stay as they are."""
        groups = [index // self.continuations for index in indices.tolist()]
        each, rest = divmod(len(groups), self.prefix.shape.batch)
        if not rest and groups == [index // each for index in range(len(groups))]:
            return None
        run = gcd(*(len(list(same)) for _, same in groupby(groups)))
        return torch.tensor(groups[::run])

    def select_batch(self, indices: torch.Tensor) -> None:
        prefixes = self.indices_of_indexed(indices)
        with self._changing():
            self.tails.select_batch(indices)
            if prefixes is not None:
                self.prefix.select_batch(prefixes)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def wait_for_copies(self) -> None:
        self.prefix.wait_for_copies()
        self.tails.wait_for_copies()

    def close(self) -> None:
        super().close()
        self.prefix.close()
        self.tails.close()


# What a layer keeps its states in.
AnyStore = Store | SharedPrefix
