"""What choosing pages works on: memory that is used again, and grows with the sequence."""

from typing import NamedTuple

import numpy as np

from .attention import Call
from .blocks import value_width
from .coded_attention import CodedCall
from .integer_kernels import uses_integer_kernels
from .key_index import CENTRE, index_layout
from .page_choice import BINS, SelectedCall
from .page_tiles import PAGES

_GROWN_BLOCKS = 64


class IndexedBlocks(NamedTuple):
    """
    Blocks of which attention may read a part. A tuple, because one is made for every layer of every token.

    Attributes:
        records: uint8 `[num_blocks or more, heads, bytes]`, see `key_index`.
        first: blocks before them.
        num_blocks: how many.
    """

    records: np.ndarray
    first: int
    num_blocks: int


class PageWorkspace:
    """
    What attention to chosen pages reads and writes besides what other attention does.

    Args:
        heads: KV heads of all sequences.
        rows: of queries, filled up, that share a KV head.
        key_dim: width of a key.
    """

    def __init__(self, heads: int, rows: int, key_dim: int):
        self._layout, inner = index_layout(key_dim), value_width(key_dim)
        units = np.array([1.0, -CENTRE], np.float32).view(np.uint32) >> 16
        self._units = np.repeat(units.astype(np.uint16)[:, None], inner, axis=1)
        self._query, self._folded, self._operands = (np.zeros((heads, rows, inner), np.float32) for _ in range(3))
        self._steps, self._constants = (np.empty((heads, rows), np.float32) for _ in range(2))
        self._bases = np.empty((heads, rows), np.float32)
        self._totals = np.empty((0, heads, rows, PAGES), np.float32)
        self._row_factors = np.empty((heads, rows), np.float32)
        self._histogram = np.empty((heads, BINS), np.float64)
        self._pages_read = np.zeros(heads, np.int64)
        self._make_pages(0)

    def _make_pages(self, blocks: int) -> None:
        heads, rows = self._bases.shape
        self._page_sums = np.empty((heads, blocks, rows, PAGES), np.float32)
        self._shares = np.empty((heads, blocks, PAGES), np.float32)
        self._chosen = np.empty((blocks, heads), np.uint8)
        self._runs = np.empty((blocks, heads), np.int64)

    def call(
        self, attention: Call | CodedCall, indexed: IndexedBlocks, segments: int, mass: float, most: float
    ) -> SelectedCall:
        """One that reads the pages that carry `mass` of the attention, or all if more than the share `most` do."""
        if indexed.num_blocks > len(self._chosen):
            self._make_pages(-(-indexed.num_blocks // _GROWN_BLOCKS) * _GROWN_BLOCKS)
        if segments > len(self._totals):
            self._totals = np.empty((segments, *self._totals.shape[1:]), np.float32)
        return SelectedCall(
            attention,
            indexed.records,
            indexed.first,
            indexed.num_blocks,
            segments,
            uses_integer_kernels(),
            self._layout.rotation,
            mass,
            int(most * indexed.num_blocks * len(self._pages_read) * PAGES),
            self._units,
            self._query,
            self._folded,
            self._operands,
            self._steps,
            self._constants,
            self._bases,
            self._page_sums,
            self._totals,
            self._row_factors,
            self._shares,
            self._histogram,
            self._chosen,
            self._runs,
            self._pages_read,
        )

    @property
    def pages_read(self) -> int:
        """By the last call, of all KV heads."""
        return int(self._pages_read.sum())
