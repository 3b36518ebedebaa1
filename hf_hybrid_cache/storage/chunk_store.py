"""A chunk as it came, for attention to it as it came, while the layer's store makes codes of it."""

import torch

from .growth import InitialCapacity
from .host_memory import HostBudget
from .host_store import HostStore
from .kv_store import KVStore, Pair


class _Unlimited(HostBudget):
    """Asks nobody: a chunk is little beside what a model computes of it, and to ask takes a millisecond."""

    def grow(self, store: object, num_tokens: int, bytes_per_token: int, moved_bytes: int = 0) -> int:
        return num_tokens


class ChunkStore(HostStore):
    """
    Keys and values of a sequence's first tokens in full precision, in host memory, in the blocks that the kernels read.

    It is stale when its layer's store has changed, and shows that one the queries that attend to it.

    Args:
        store: of the layer, which holds the same tokens, and nothing else.
        keys: `[batch, num_kv_heads, tokens, head_dim]`, on the CPU.
        values: likewise.
    """

    def __init__(self, store: KVStore, keys: torch.Tensor, values: torch.Tensor):
        # First, because its version counts as this one's.
        self._store, self._states = store, (keys, values)
        super().__init__(store.shape, InitialCapacity(0, keys.shape[2]), _Unlimited(1))
        self.extend(keys, values)

    @property
    def version(self) -> int:
        """That of the layer's store."""
        return self._store.version

    @version.setter
    def version(self, version: int) -> None:
        """Its own does not count."""

    @property
    def wants_queries(self) -> bool:
        return self._store.wants_queries

    def observe(self, query: torch.Tensor) -> None:
        self._store.observe(query)

    def read(self) -> Pair:
        return self._states
