"""The first chunk of a prompt in full precision: attention reads it while the layer's store quantizes it."""

import torch

from .block_segment import BlockSegment
from .growth import InitialCapacity
from .host_memory import HostBudget
from .kv_store import KVStore, Pair
from .layer_store import LayerStore
from .layout import Layout
from .scratch import Scratch


class _Unlimited(HostBudget):
    """A budget without checks: a chunk is small beside a model's activations, and a check takes a millisecond."""

    def grow(self, store: object, num_tokens: int, bytes_per_token: int, moved_bytes: int = 0) -> int:
        return num_tokens


class ChunkStore(LayerStore):
    """
    Keys and values of a sequence's first tokens in full precision, in host memory, in the blocks that the kernels read.

    It is stale once the layer's store has changed. It passes the queries that attend to it on to that store.

    Args:
        store: store of the layer, which holds these tokens and no others.
        keys: `[batch, num_kv_heads, tokens, head_dim]`, on the CPU.
        values: the same, but for their own head_dim.
    """

    def __init__(self, store: KVStore, keys: torch.Tensor, values: torch.Tensor):
        # First, because the version of this store is read from it.
        self._store, self._states = store, (keys, values)
        full = BlockSegment(store.shape, InitialCapacity(0, keys.shape[2]), _Unlimited(1))
        super().__init__(store.shape, Layout(), full, Scratch(store.shape.device))
        self.extend(keys, values)

    @property
    def version(self) -> int:
        """Version of the layer's store."""
        return self._store.version

    @version.setter
    def version(self, version: int) -> None:
        """Ignore the version, because the layer's store counts changes."""

    @property
    def wants_queries(self) -> bool:
        return self._store.wants_queries

    def observe(self, query: torch.Tensor) -> None:
        self._store.observe(query)

    def read(self) -> Pair:
        return self._states
