"""Keys and values of several continuations of a prompt, which is stored once."""

from collections.abc import Sequence
from itertools import groupby
from math import gcd

import torch

from .layout import Layout
from .memory.growth import GRANULE
from .runs.run import repeated
from .runs.streamed import Streamed
from .segments import Segment
from .split_store import SplitStore
from .store import Store
from .token_store import TokenStore

# The tokens of sequences that share nothing.
OneSequence = Store | SplitStore


class SharedPrefix(TokenStore):
    """
    Groups of sequences that begin with the same tokens, with a prefix for each group and a tail for each sequence.

    Example, two prompts of 200 tokens with three continuations each:
        prefix [2, heads, 192, head_dim]   tails [6, heads, 8 and more, head_dim]

    Sequence `i` continues prefix `i // continuations`. The prefix is whole blocks, and does not change as tokens come.

    Args:
        prefix: the first tokens of all groups.
        tails: the tokens after them, of all sequences, in the order of groups.
    """

    def __init__(self, prefix: OneSequence, tails: OneSequence):
        self.shape = prefix.shape._replace(batch=tails.shape.batch)
        self.prefix, self.tails, self._choice, self._scratch = prefix, tails, prefix._choice, tails._scratch

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.prefix.num_tokens + self.tails.num_tokens

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.prefix.version + self.tails.version

    @classmethod
    def continuing(cls, store: OneSequence, tails: OneSequence) -> "SharedPrefix":
        """
        Make `store` the prefix, and let several sequences continue each of its sequences; copy its last tokens.

        Args:
            store: with whole blocks to share (`num_settled`).
            tails: empty store for the tokens after these blocks.

        Raises:
            HostMemoryError: the host has no room for the copies; nothing has changed then.
        """
        store.settle()
        num_shared = store.num_settled
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
    def streamed(self) -> Streamed | None:  # type: ignore[override]
        return self.prefix.streamed

    @property
    def least_tokens(self) -> int:
        """Least number of tokens that a removal may leave, which is a block and all sinks."""
        return max(GRANULE, self.prefix.layout.sink_tokens)

    @property
    def is_intact(self) -> bool:
        """Whether both stores are whole."""
        return not self._is_changing and self.prefix.is_intact and self.tails.is_intact

    def settled_after(self, lengths: Sequence[int]) -> int:
        shared = self.prefix.num_tokens
        return shared + self.tails.settled_after([each - shared for each in lengths])

    def segments(self) -> list[Segment]:
        prefix = (each._replace(repeats=self.continuations) for each in self.prefix.segments())
        return [*prefix, *self.tails.segments()]

    def write(self, keys: torch.Tensor, values: torch.Tensor, on_device: bool = False) -> None:
        self.is_staged = on_device
        if on_device and isinstance(self.prefix, Store) and self.prefix.packed is None:
            self.prefix.stage(on_device)
        self.tails.write(keys, values, on_device)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`. If they are fewer than `least_tokens`, all are to be stored anew."""
        left = num_tokens - self.prefix.num_tokens
        if left >= 0:
            self.tails.truncate(left)
            return
        with self._changing():
            self.tails.truncate(0)
            self.prefix.truncate(num_tokens)
            # Blocks are counted from the first token, so a block that was cut goes on in the tails.
            whole = self.prefix.num_settled
            rest = self.prefix.copy_from(whole)
            self.prefix.truncate(whole)
            self.tails.add(*repeated(rest, self.continuations))

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

    def close(self) -> None:
        self.prefix.close()
        self.tails.close()


# What a layer keeps its states in.
AnyStore = OneSequence | SharedPrefix
