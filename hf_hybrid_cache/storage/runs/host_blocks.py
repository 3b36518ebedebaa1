"""Keys and values kept in host memory in blocks, for attention on the CPU."""

import numpy as np
import torch

from ..kv_shape import KVShape, Pair
from ..memory.buffer_memory import HostMemory
from ..memory.growth import GRANULE, InitialCapacity
from ..memory.host_memory import HostBudget
from .block_buffer import BlockBuffer
from .run import Run
from .token_buffer import TokenBuffer


class HostBlocks(Run):
    """
    Keys and values in host memory, in the blocks that the kernels read, for attention on the CPU.

    Args:
        capacity: of the buffers before the first token.
        packed: states are packed blocks.
        pinned_for: page-lock the memory for copies to and from this device.
    """

    def __init__(
        self,
        shape: KVShape,
        capacity: InitialCapacity,
        budget: HostBudget,
        packed: bool = False,
        pinned_for: torch.device | None = None,
    ):
        memory = HostMemory(capacity.host_tokens, GRANULE if packed else 1, pinned_for)
        if packed:
            keys = TokenBuffer(shape.keys, shape.key_dtype, memory, token_major=True)
            values = TokenBuffer(shape.values, shape.value_dtype, memory, token_major=True)
        else:
            keys = BlockBuffer(shape.keys, shape.key_dtype, memory, transposed=True)
            values = BlockBuffer(shape.values, shape.value_dtype, memory, transposed=False)
        super().__init__(shape, keys, values, budget)

    @classmethod
    def like(cls, run: Run, num_entries: int = 0) -> "HostBlocks":
        """Make an empty run for the entries of `run`, or for `num_entries`, with a budget of its own."""
        entry_tokens = run.keys.entry_tokens
        shape = run.shape._replace(device=torch.device("cpu"))
        capacity = InitialCapacity(0, max(num_entries, run.num_entries))
        return HostBlocks(shape, capacity, HostBudget(1, entry_tokens), entry_tokens == GRANULE)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values as kernels read them, see `BlockBuffer`; call `wait_until_stored` first."""
        return self.keys.held.array, self.values.held.array

    def rows(self) -> Pair:
        """Return writable views of keys and values in whole rows, as they are stored; call `wait_for_copies` first."""
        return self.keys.stored_rows(self.num_entries), self.values.stored_rows(self.num_entries)

    def clear_rest(self) -> None:
        """Zero the last row after the last entry, where removed tokens may be."""
        for buffer in self.buffers():
            buffer.clear_rest(self.num_entries)

    def make_rows(self, num_entries: int) -> None:
        """
        Make rows with any content for so many entries, which count as stored from then on.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed then.
        """
        self.reserve(num_entries)
        self.num_entries = num_entries

    def map_rows(self, file: int, offsets: tuple[int, int], num_entries: int) -> bool:
        """
        Map the rows of keys and values to an open file, from `offsets` on; the entries count as stored then.

        Returns:
            False where the system cannot do that; use `make_rows` then.
        """
        pairs = zip(self.buffers(), offsets, strict=True)
        if not all(buffer.map_file(file, offset, num_entries) for buffer, offset in pairs):
            return False
        # The budget is not asked: the pages are those of the file until they are written to.
        self._budget.note(self, num_entries, self.bytes_per_token)
        self.num_entries = num_entries
        return True
