"""Top-p page selection of one layer: the index of its keys, by which attention rates pages, and what it has read."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..kernels import IndexedBlocks, index_bytes, quantize_index
from ..storage import (
    GRANULE,
    CacheStats,
    HostBudget,
    HostMemory,
    InitialCapacity,
    Store,
    TokenBuffer,
    kernel_array,
    reserve_entries,
)

# Steps that read all pages after too many were needed, before pages are rated again.
_STEPS_BETWEEN = 16
# Query rows of a KV head: with more of them nearly all pages matter to one of them.
_MOST_ROWS = 64
_INDEXED_AT_ONCE = 64


class KeyIndex:
    """
    The key index of one layer's blocks, see `kernels.key_index`; keys of quantized blocks are dequantized for it.

    It is made from a store, and can be made again. New blocks are indexed when attention asks for the index. Code that
    removes tokens or changes sequences in the store must do so here, too.

    Args:
        budget: asked before host memory is used; blocks are its entries.
        capacity: of the buffer before the first block.
    """

    def __init__(self, budget: HostBudget, capacity: InitialCapacity):
        self._budget, self._capacity = budget, capacity
        self._packed: TokenBuffer | None = None
        self._first = self._blocks = 0

    def __deepcopy__(self, memo: dict) -> "KeyIndex":
        """Return an empty index, which is made again when attention asks for it."""
        return KeyIndex(copy.deepcopy(self._budget, memo), self._capacity)

    def of(self, store: Store) -> IndexedBlocks | None:
        """
        Return the index of the blocks that are stored now; `None` if none is to be indexed.

        Raises:
            HostMemoryError: the host has no room for it.
        """
        blocks = store.indexed_blocks
        if not blocks:
            return None
        first, count = blocks.start, len(blocks)
        packed = self._made(store)
        if self._blocks < count:
            self._first = first
        while self._blocks < count:
            end = min(self._blocks + _INDEXED_AT_ONCE, count)
            reserve_entries(self, [packed], self._budget, end, self._blocks)
            keys = kernel_array(store.block_keys(first + self._blocks, first + end))
            quantize_index(keys, packed.array()[self._blocks : end])
            self._blocks = end
        return IndexedBlocks(packed.array(), first, count)

    def form(self, store: Store) -> torch.Size:
        """Return the shape of rows in a file, uint8 `[blocks, batch, num_kv_heads, bytes]`."""
        return self._made(store).stored_shape(len(store.indexed_blocks))

    def rows(self, store: Store) -> torch.Tensor:
        """Return a view of all packed blocks, as a file stores them."""
        indexed = self.of(store)
        return self._made(store).stored_rows(0 if indexed is None else indexed.num_blocks)

    def map_rows(self, store: Store, file: int, offset: int) -> bool:
        """
        Map the rows to an open file, from `offset` on.

        Returns:
            False where the system cannot do that; use `make_rows` then.
        """
        self.clear()
        packed, blocks = self._made(store), store.indexed_blocks
        count = len(blocks)
        if not packed.map_file(file, offset, count):
            return False
        self._first, self._blocks = blocks.start, count
        self._budget.note(self, count, packed.bytes_per_token)
        return True

    def make_rows(self, store: Store) -> torch.Tensor:
        """
        Make rows for all blocks, to be written to.

        Raises:
            HostMemoryError: the host has no room for them.
        """
        self.clear()
        packed, blocks = self._made(store), store.indexed_blocks
        reserve_entries(self, [packed], self._budget, len(blocks), self._blocks)
        self._first, self._blocks = blocks.start, len(blocks)
        return packed.stored_rows(len(blocks))

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks of which not all tokens are among the first `num_tokens`."""
        self._blocks = max(0, min(self._blocks, num_tokens // GRANULE - self._first))

    @contextmanager
    def following(self, indices: torch.Tensor) -> Iterator[None]:
        """
        Make sequence `i` what sequence `indices[i]` was, once the store has done so.

        After an error the index is made again.
        """
        blocks, self._blocks = self._blocks, 0
        yield
        if self._packed is not None:
            self._packed, self._blocks = self._packed.select(indices.cpu(), blocks), blocks
            self._budget.note(self, self._budget.granted(self), self._packed.bytes_per_token)

    def clear(self) -> None:
        """Give the memory back."""
        self._packed, self._blocks = None, 0
        self._budget.forget(self)

    def buffers(self) -> list[TokenBuffer]:
        """Return the buffers that hold memory."""
        return [] if self._packed is None else [self._packed]

    def _made(self, store: Store) -> TokenBuffer:
        shape = store.shape
        wanted = (shape.batch, shape.num_kv_heads, index_bytes(shape.key_dim))
        if self._packed is None or self._packed.shape != wanted:
            self.clear()
            memory = HostMemory(self._capacity.host_tokens, GRANULE)
            self._packed = TokenBuffer(wanted, torch.uint8, memory, token_major=True)
        return self._packed


class LayerSelection:
    """
    The selection of one layer: how much the next call may skip, and how much the last ones have read.

    Args:
        layer_idx: index in the model.
        top_p: of a user's `Selection`; 1 for a layer that reads all.
        most: of the same.
        index: index of the layer's keys.
        stats: counters of the cache.
    """

    def __init__(self, layer_idx: int, top_p: float, most: float, index: KeyIndex, stats: CacheStats):
        self.top_p, self.most, self.index = top_p, most, index
        self._layer_idx, self._stats = layer_idx, stats
        self._dense_steps_left = 0

    @property
    def reads_all(self) -> bool:
        """Whether no page may ever be skipped."""
        return self.top_p == 1

    def reset(self) -> None:
        """Forget the counts of the last calls, and the index."""
        self._dense_steps_left = 0
        self.index.clear()

    def indexed(self, store: Store, rows: int) -> IndexedBlocks | None:
        """
        Return the blocks of which a call with so many query rows for each KV head may read a part; `None` for none.

        Raises:
            HostMemoryError: the host has no room for their index.
        """
        reads_all = self.reads_all or self._dense_steps_left or rows > _MOST_ROWS
        return None if reads_all else self.index.of(store)

    def note(self, tokens: int, skipped: int, has_rated: bool) -> None:
        """Note the tokens that a call has skipped, of all tokens of each KV head, and whether it has rated pages."""
        if has_rated:
            self._dense_steps_left = 0 if skipped else _STEPS_BETWEEN - 1
        else:
            self._dense_steps_left = max(0, self._dense_steps_left - 1)
        self._stats.note_read(self._layer_idx, tokens - skipped, tokens)
