"""What choosing pages works on: memory that is used again, and grows with the sequence."""

import numpy as np

from .coded_attention import CodedCall
from .page_tiles import PAGES
from .selected_attention import BINS, SelectedCall

_GROWN_BLOCKS = 64


class PageWorkspace:
    """
    What `attend_selected` reads and writes besides what a `CodedCall` has.

    Args:
        heads: KV heads of all sequences.
        rows: of queries, filled up, that share a KV head.
    """

    def __init__(self, heads: int, rows: int):
        self._row_bases = np.empty((heads, rows), np.float32)
        self._row_factors = np.empty((heads, rows), np.float32)
        self._histogram = np.empty((heads, BINS), np.float64)
        self._pages_read = np.zeros(heads, np.int64)
        self._make_pages(0)

    def _make_pages(self, blocks: int) -> None:
        heads, rows = self._row_bases.shape
        self._page_bases = np.empty((blocks, heads, rows), np.float32)
        self._page_sums = np.empty((blocks, heads, rows, PAGES), np.float32)
        self._shares = np.empty((heads, blocks, PAGES), np.float32)
        self._chosen = np.empty((blocks, heads), np.uint8)
        self._runs = np.empty((blocks, heads), np.int64)

    def call(self, coded: CodedCall, mass: float, most: float) -> SelectedCall:
        """One that reads the pages that carry `mass` of the attention, or all if more than the share `most` do."""
        if coded.coded_blocks > len(self._page_bases):
            self._make_pages(-(-coded.coded_blocks // _GROWN_BLOCKS) * _GROWN_BLOCKS)
        return SelectedCall(
            coded,
            mass,
            int(most * coded.coded_blocks * len(self._pages_read) * PAGES),
            self._page_bases,
            self._page_sums,
            self._row_bases,
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
