"""The packed blocks of a layer's quantized keys, or values, in host memory."""

import numpy as np
import torch

from ..memory.growth import GRANULE
from .run_buffer import RunBuffer
from .token_buffer import TokenBuffer


class PackedBuffer(RunBuffer):
    """
    Packed blocks, `[packed, batch, num_kv_heads, bytes]`. An entry is one block of 64 tokens.

    Args:
        shape: `(batch, num_kv_heads, bytes)`.
        expected_packed: reserve address space for this many.
        pinned_for: see `RunBuffer`.
    """

    def __init__(self, shape: tuple[int, int, int], expected_packed: int = 0, pinned_for: torch.device | None = None):
        super().__init__(shape, torch.uint8, True, expected_packed, GRANULE, pinned_for)

    def array(self) -> np.ndarray:
        """Return a view of the packed blocks for a kernel, `[packed, batch * heads, bytes]`."""
        return self._array

    def load(self, target: TokenBuffer, start: int, end: int) -> None:
        """Copy packed blocks `start` to `end` to the start of a buffer on a device."""
        for first, last in self._copies(start, end):
            there = target.read_range(first - start, last - start)
            there.copy_(self.read_range(first, last), non_blocking=True)

    def save(self, source: TokenBuffer, start: int, end: int, first_there: int = 0) -> None:
        """Copy packed blocks `start` to `end` from a buffer on a device that begins with block `first_there`."""
        for first, last in self._copies(start, end):
            there = source.read_range(first - first_there, last - first_there)
            self.read_range(first, last).copy_(there, non_blocking=True)

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._array = data.flatten(1, 2).numpy()
