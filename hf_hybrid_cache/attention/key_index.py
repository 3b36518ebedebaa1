"""The index of one layer's keys, by which attention rates pages. It is made from a store, and can be made again."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..kernels import IndexedBlocks, index_bytes, quantize_index
from ..storage import (
    GRANULE,
    HostBudget,
    InitialCapacity,
    PackedBuffer,
    Store,
    TokenBuffer,
    block_keys,
    grown_capacity,
    kernel_array,
)

_INDEXED_AT_ONCE = 64


class KeyIndex:
    """
    The key index of one layer's blocks, see `kernels.key_index`; keys of quantized blocks are dequantized for it.

    New blocks are indexed when attention asks for the index. Code that removes tokens or changes sequences in the store
    must do so here, too.

    Args:
        budget: asked before host memory is used; blocks are its entries.
        capacity: of the buffer before the first block.
    """

    def __init__(self, budget: HostBudget, capacity: InitialCapacity):
        self._budget, self._capacity = budget, capacity
        self._packed: PackedBuffer | None = None
        self._first = self._blocks = self._approved_blocks = 0

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
        if self._blocks < count:
            self._extend(store, first, count)
        assert self._packed is not None
        return IndexedBlocks(self._packed.array(), first, count)

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
        self._first, self._blocks, self._approved_blocks = blocks.start, count, count
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
        self._reserve(packed, len(blocks))
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
            self._budget.note(self, self._approved_blocks, self._packed.bytes_per_token)

    def clear(self) -> None:
        """Give the memory back."""
        self._packed, self._blocks, self._approved_blocks = None, 0, 0
        self._budget.forget(self)

    def buffers(self) -> list[TokenBuffer]:
        """Return the buffers that hold memory."""
        return [] if self._packed is None else [self._packed]

    def _extend(self, store: Store, first: int, count: int) -> None:
        """Index the blocks that are still to be, up to `count` of them."""
        packed, self._first = self._made(store), first
        while self._blocks < count:
            end = min(self._blocks + _INDEXED_AT_ONCE, count)
            self._reserve(packed, end)
            keys = kernel_array(block_keys(store, first + self._blocks, first + end))
            quantize_index(keys, packed.array()[self._blocks : end])
            self._blocks = end

    def _made(self, store: Store) -> PackedBuffer:
        shape = store.shape
        wanted = (shape.batch, shape.num_kv_heads, index_bytes(shape.key_dim))
        if self._packed is None or self._packed.shape != wanted:
            self.clear()
            self._packed = PackedBuffer(wanted, self._capacity.host_tokens)
        return self._packed

    def _reserve(self, packed: PackedBuffer, num_blocks: int) -> None:
        if num_blocks > self._approved_blocks:
            moved = packed.moved_bytes(grown_capacity(num_blocks, GRANULE))
            approved = self._budget.grow(self, num_blocks, packed.bytes_per_token, moved)
            packed.ensure_capacity(approved, self._blocks)
            self._approved_blocks = approved
        packed.ensure(num_blocks, self._blocks)
