"""The index of one layer's keys, by which attention finds what matters: made of what a store has, never the truth."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..kernels import IndexedBlocks, encode_index, index_bytes
from ..storage import (
    GRANULE,
    RECENT_TOKENS,
    CodedStore,
    HostBudget,
    HostStore,
    InitialCapacity,
    RecordBuffer,
    TokenBuffer,
    grown_capacity,
    kernel_array,
)

# In full precision the first block and the last ones are always attended to, as where the others are coded.
_FIRST_BLOCKS = 1
_INDEXED_AT_ONCE = 64


class KeyIndex:
    """
    Rough codes of the keys of one layer's blocks, see `kernels.key_index`; of coded blocks by what codes stand for.

    Blocks are indexed when attention asks, those that have come since. Who removes tokens or changes sequences says so
    here, too.

    Args:
        budget: asked before host memory is used; blocks are its entries.
        capacity: of the buffer before the first block.
    """

    def __init__(self, budget: HostBudget, capacity: InitialCapacity):
        self._budget, self._capacity = budget, capacity
        self._records: RecordBuffer | None = None
        self._first = self._blocks = self._approved_blocks = 0

    def __deepcopy__(self, memo: dict) -> "KeyIndex":
        """An empty one, which is made again when it is asked for."""
        return KeyIndex(copy.deepcopy(self._budget, memo), self._capacity)

    def of(self, store: HostStore | CodedStore) -> IndexedBlocks | None:
        """
        The index of what is stored now; `None` where no block is to be indexed.

        Raises:
            HostMemoryError: the host has no room for it.
        """
        first, count = _first_block(store), _num_blocks(store)
        if not count:
            return None
        if self._blocks < count:
            self._extend(store, first, count)
        assert self._records is not None
        return IndexedBlocks(self._records.array(), first, count)

    def form(self, store: HostStore | CodedStore) -> torch.Size:
        """The shape that rows have in a file: uint8 `[blocks, batch, num_kv_heads, bytes]`."""
        return self._made(store).stored_shape(_num_blocks(store))

    def rows(self, store: HostStore | CodedStore) -> torch.Tensor:
        """What is in a file, all of it: a view."""
        indexed = self.of(store)
        return self._made(store).stored_rows(0 if indexed is None else indexed.num_blocks)

    def map_rows(self, store: HostStore | CodedStore, file: int, offset: int) -> bool:
        """
        Let the rows be those of an open file, from `offset` on.

        Returns:
            False where the system cannot do that; use `make_rows` then.
        """
        self.clear()
        records, count = self._made(store), _num_blocks(store)
        if not records.map_file(file, offset, count):
            return False
        self._first, self._blocks, self._approved_blocks = _first_block(store), count, count
        self._budget.note(self, count, records.bytes_per_token)
        return True

    def make_rows(self, store: HostStore | CodedStore) -> torch.Tensor:
        """
        Rows for all blocks, to be written to.

        Raises:
            HostMemoryError: the host has no room for them.
        """
        self.clear()
        records, count = self._made(store), _num_blocks(store)
        self._reserve(records, count)
        self._first, self._blocks = _first_block(store), count
        return records.stored_rows(count)

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks of which not all tokens are among the first `num_tokens`."""
        self._blocks = max(0, min(self._blocks, num_tokens // GRANULE - self._first))

    @contextmanager
    def following(self, indices: torch.Tensor) -> Iterator[None]:
        """
        Make sequence `i` what sequence `indices[i]` was, once the store has done so.

        If that does not end well, the index is made again.
        """
        blocks, self._blocks = self._blocks, 0
        yield
        if self._records is not None:
            records = self._records.select_batch(indices, blocks)
            assert isinstance(records, RecordBuffer)
            self._records, self._blocks = records, blocks
            self._budget.note(self, self._approved_blocks, records.bytes_per_token)

    def clear(self) -> None:
        """Give the memory back."""
        self._records, self._blocks, self._approved_blocks = None, 0, 0
        self._budget.forget(self)

    def buffers(self) -> list[TokenBuffer]:
        """What holds memory."""
        return [] if self._records is None else [self._records]

    def _extend(self, store: HostStore | CodedStore, first: int, count: int) -> None:
        """Index the blocks that are still to be, up to `count` of them."""
        records, self._first = self._made(store), first
        while self._blocks < count:
            end = min(self._blocks + _INDEXED_AT_ONCE, count)
            self._reserve(records, end)
            keys = kernel_array(_keys(store, first + self._blocks, first + end))
            encode_index(keys, records.array()[self._blocks : end])
            self._blocks = end

    def _made(self, store: HostStore | CodedStore) -> RecordBuffer:
        shape = store.shape
        wanted = (shape.batch, shape.num_kv_heads, index_bytes(shape.key_dim))
        if self._records is None or self._records.shape != wanted:
            self.clear()
            self._records = RecordBuffer(wanted, self._capacity.host_tokens)
        return self._records

    def _reserve(self, records: RecordBuffer, num_blocks: int) -> None:
        if num_blocks > self._approved_blocks:
            moved = records.moved_bytes(grown_capacity(num_blocks, GRANULE))
            approved = self._budget.grow(self, num_blocks, records.bytes_per_token, moved)
            records.ensure_capacity(approved, self._blocks)
            self._approved_blocks = approved
        records.ensure(num_blocks, self._blocks)


def _first_block(store: HostStore | CodedStore) -> int:
    return store.sink_tokens // GRANULE if isinstance(store, CodedStore) else _FIRST_BLOCKS


def _num_blocks(store: HostStore | CodedStore) -> int:
    """Blocks that are indexed."""
    if isinstance(store, CodedStore):
        return store.records.num_tokens
    return max(0, (store.num_tokens - RECENT_TOKENS) // GRANULE - _FIRST_BLOCKS)


def _keys(store: HostStore | CodedStore, first: int, end: int) -> torch.Tensor:
    """Those of some blocks, `[batch, num_kv_heads, tokens, key_dim]`."""
    if isinstance(store, CodedStore):
        return store.decoded_keys(first - _first_block(store), end - _first_block(store))
    return store.keys.read_range(first * GRANULE, end * GRANULE)
