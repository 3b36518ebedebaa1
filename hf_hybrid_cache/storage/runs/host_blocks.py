"""Keys and values kept in host memory in blocks, for attention on the CPU."""

import torch

from ..buffers.block_buffer import BlockBuffer
from ..buffers.packed_buffer import PackedBuffer
from ..kv_store import KVShape, Pair
from ..memory.growth import GRANULE, InitialCapacity
from ..memory.host_memory import HostBudget
from .run import Run


class HostBlocks(Run):
    """
    Keys and values in host memory, in the blocks that the kernels read, for attention on the CPU.

    Args:
        shape: of the states.
        capacity: of the buffers before the first token.
        budget: asked before host memory is used.
        packed: states are packed blocks.
        pinned_for: page-lock the memory for copies to and from this device.
    """

    keys: BlockBuffer | PackedBuffer
    values: BlockBuffer | PackedBuffer

    def __init__(
        self,
        shape: KVShape,
        capacity: InitialCapacity,
        budget: HostBudget,
        packed: bool = False,
        pinned_for: torch.device | None = None,
    ):
        keys: BlockBuffer | PackedBuffer
        values: BlockBuffer | PackedBuffer
        if packed:
            keys = PackedBuffer(shape.keys, capacity.host_tokens, pinned_for)
            values = PackedBuffer(shape.values, capacity.host_tokens, pinned_for)
        else:
            keys = BlockBuffer(shape.keys, shape.key_dtype, True, capacity.host_tokens, pinned_for)
            values = BlockBuffer(shape.values, shape.value_dtype, False, capacity.host_tokens, pinned_for)
        super().__init__(shape, keys, values, budget)

    @classmethod
    def like(cls, segment: Run, num_tokens: int = 0) -> "HostBlocks":
        """Make an empty segment for the entries of `segment`, or for `num_tokens`, with a budget of its own."""
        entry_tokens = segment.keys.entry_tokens
        shape = segment.shape._replace(device=torch.device("cpu"))
        return HostBlocks(
            shape,
            InitialCapacity(0, max(num_tokens, segment.num_entries)),
            HostBudget(1, entry_tokens),
            entry_tokens == GRANULE,
        )

    def __deepcopy__(self, memo: dict) -> "HostBlocks":
        return self._duplicate(memo)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, copied out of the blocks unless there are no others."""
        only_these = self.num_entries == 0
        self.write(keys, values)
        return (keys, values) if only_these else self.read()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return writable views of keys and values in whole rows, as they are stored; call `wait_for_copies` first."""
        return self.keys.stored_rows(self.num_entries), self.values.stored_rows(self.num_entries)

    def clear_rest(self) -> None:
        """Zero the last row after the last entry, where removed tokens may be."""
        for buffer in (self.keys, self.values):
            buffer.clear_rest(self.num_entries)

    def map_rows(self, file: int, offsets: tuple[int, int], num_entries: int, in_part: bool) -> bool:
        """
        Map the rows of keys and values to an open file, from `offsets` on; the entries count as stored then.

        With `in_part` they are read in part: the system is told not to read ahead.

        Returns:
            False where the system cannot do that; use `make_rows` then.
        """
        pairs = zip((self.keys, self.values), offsets, strict=True)
        if not all(buffer.map_file(file, offset, num_entries, in_part) for buffer, offset in pairs):
            return False
        # The budget is not asked: the pages are those of the file until they are written to.
        self._approved_tokens = num_entries
        self._budget.note(self, num_entries, self.bytes_per_token)
        self._set_length(num_entries)
        return True
