"""A chunk of a prompt in full precision: attention reads it while the layer's store quantizes it."""

import torch

from .kv_store import Pair
from .layout import Layout
from .memory.growth import InitialCapacity
from .memory.host_memory import HostBudget
from .runs.host_blocks import HostBlocks
from .scratch import Scratch
from .store import Store


class _Unlimited(HostBudget):
    """A budget without checks: a chunk is small beside a model's activations, and a check takes a millisecond."""

    def grow(self, store: object, num_tokens: int, bytes_per_token: int, moved_bytes: int = 0) -> int:
        return num_tokens


class ChunkStore(Store):
    """
    Keys and values of a chunk in full precision, in host memory, in the blocks that the kernels read.

    It holds the recent tokens before the chunk, too, but neither sinks nor quantized blocks: these are in the layer's
    store. Of a sequence's first chunk it holds all tokens. It is stale once the layer's store has changed. It passes
    the queries that attend to it on to that store.

    Args:
        store: store of the layer, before it takes the chunk; nothing is pending.
        keys: `[batch, num_kv_heads, tokens, head_dim]`, on the CPU.
        values: the same, but for their own head_dim.

    Attributes:
        stored: store of the layer.
        first: the first token that is held; the first of a block.
        tokens_before: number of tokens before the chunk.
        num_tokens: tokens of the sequence, the chunk included.
        quantized_ends: for each token of the chunk the first one after sinks and quantized blocks, had the tokens come
            one by one.
    """

    def __init__(self, store: Store, keys: torch.Tensor, values: torch.Tensor):
        # First, because the version of this store is read from it.
        self.stored = store
        self.tokens_before, layout = store.num_tokens, store.layout
        self.first = layout.quantized_end if self.tokens_before else 0
        end = self.tokens_before + keys.shape[2]
        self.quantized_ends = layout.quantized_ends(self.tokens_before, end)
        full = HostBlocks(store.shape, InitialCapacity(0, end - self.first), _Unlimited(1))
        super().__init__(store.shape, Layout(), full, Scratch(store.shape.device))
        full.write(*store.dense.read_range(min(store.sink_tokens, store.dense.num_entries), store.dense.num_entries))
        sinks = max(0, self.first - self.tokens_before)
        full.write(keys[:, :, sinks:], values[:, :, sinks:])
        self.num_tokens = end

    @property
    def version(self) -> int:
        """Version of the layer's store."""
        return self.stored.version

    @version.setter
    def version(self, version: int) -> None:
        """Ignore the version, because the layer's store counts changes."""

    @property
    def wants_queries(self) -> bool:
        return self.stored.wants_queries

    def observe(self, query: torch.Tensor) -> None:
        self.stored.observe(query)

    def read(self) -> Pair:
        return self.stored.read() if self.tokens_before else super().read()
