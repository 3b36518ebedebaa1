"""The records of a layer's coded keys, or values, in host memory."""

import numpy as np
import torch

from .growth import GRANULE
from .run_buffer import RunBuffer
from .token_buffer import TokenBuffer


class RecordBuffer(RunBuffer):
    """
    Records of coded blocks, `[records, batch, num_kv_heads, bytes]`: an entry is one block of 64 tokens.

    Args:
        shape: `(batch, num_kv_heads, bytes)`.
        expected_records: reserve address space for this many.
        pinned_for: see `RunBuffer`.
    """

    def __init__(self, shape: tuple[int, int, int], expected_records: int = 0, pinned_for: torch.device | None = None):
        super().__init__(shape, torch.uint8, True, expected_records, GRANULE, pinned_for)

    def array(self) -> np.ndarray:
        """What is stored, for a kernel: `[records, batch * heads, bytes]`, not a copy."""
        return self._array

    def load(self, target: TokenBuffer, start: int, end: int) -> None:
        """Copy records `start` to `end` to the begin of a buffer on a device."""
        for first, last in self._pieces(start, end):
            target.write(first - start, self.read_range(first, last).to(target.device, non_blocking=True))

    def save(self, source: TokenBuffer, start: int, end: int, first_there: int = 0) -> None:
        """Copy records `start` to `end` from a buffer on a device, whose first one is the record `first_there`."""
        for first, last in self._pieces(start, end):
            there = source.read_range(first - first_there, last - first_there)
            self.read_range(first, last).copy_(there, non_blocking=True)

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._array = data.flatten(1, 2).numpy()
