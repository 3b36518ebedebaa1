"""Memory of page selection, used again for each call; it grows with the sequence."""

from typing import Any, NamedTuple

import numpy as np

from ..attention.page_tiles import PAGES
from ..attention.quantized_attention import QuantizedCall
from ..blocks import value_width
from ..integer_kernels import uses_integer_kernels
from .key_index import CENTRE, index_layout
from .page_selection import BINS, SelectedCall, SelectedQuantizedCall

_GROWN_BLOCKS = 64


class IndexedBlocks(NamedTuple):
    """
    Blocks of which attention may read a part.

    It is a tuple, because one is made for each layer and token.

    Attributes:
        packed: uint8 `[num_blocks or more, heads, bytes]`, see `key_index`.
        first: number of blocks before them.
        num_blocks: number of these blocks.
    """

    packed: np.ndarray
    first: int
    num_blocks: int


class PageWorkspace:
    """
    Memory that attention to chosen pages uses besides a `Workspace`.

    Args:
        heads: KV heads of all sequences.
        rows: query rows that share a KV head, padded.
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

    def call(self, attention: Any, indexed: IndexedBlocks, segments: int, top_p: float, most: float) -> Any:
        """
        Make a call that reads the pages that carry `top_p` of the attention, or all pages.

        Args:
            attention: a `Call` or a `QuantizedCall`.
            indexed: blocks of which the call reads a part.
            segments: of the indexed blocks.
            top_p: share of the attention that the pages carry.
            most: share of the pages; if more are needed, the call reads all.

        Returns:
            A `SelectedCall` or a `SelectedQuantizedCall`.
        """
        if indexed.num_blocks > len(self._chosen):
            self._make_pages(-(-indexed.num_blocks // _GROWN_BLOCKS) * _GROWN_BLOCKS)
        if segments > len(self._totals):
            self._totals = np.empty((segments, *self._totals.shape[1:]), np.float32)
        made = SelectedQuantizedCall if isinstance(attention, QuantizedCall) else SelectedCall
        return made(
            attention=attention,
            index=indexed.packed,
            first=indexed.first,
            blocks=indexed.num_blocks,
            segments=segments,
            is_integer=uses_integer_kernels(),
            rotation=self._layout.rotation,
            top_p=top_p,
            most_pages=int(most * indexed.num_blocks * len(self._pages_read) * PAGES),
            units=self._units,
            query=self._query,
            folded=self._folded,
            operands=self._operands,
            steps=self._steps,
            constants=self._constants,
            bases=self._bases,
            page_sums=self._page_sums,
            totals=self._totals,
            row_factors=self._row_factors,
            shares=self._shares,
            histogram=self._histogram,
            chosen=self._chosen,
            runs=self._runs,
            pages_read=self._pages_read,
        )

    @property
    def pages_read(self) -> int:
        """Pages that the last call has read, of all KV heads."""
        return int(self._pages_read.sum())
