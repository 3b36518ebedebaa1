"""Keys and values kept in host memory in blocks, for attention on the CPU."""

import torch

from .block_buffer import BlockBuffer
from .buffered_store import BufferedStore
from .growth import Room
from .host_memory import HostBudget
from .kv_store import KVShape
from .record_buffer import RecordBuffer


class HostStore(BufferedStore):
    """
    Keys and values in host memory, in the blocks that the kernels read, of a model that computes there too.

    Args:
        shape: of the states.
        room: to make before the first token.
        budget: asked before host memory is used.
        records: states are records of coded blocks.
        pinned_for: page-lock the memory for copies to and from this CUDA device.
    """

    keys: BlockBuffer | RecordBuffer
    values: BlockBuffer | RecordBuffer

    def __init__(
        self,
        shape: KVShape,
        room: Room,
        budget: HostBudget,
        records: bool = False,
        pinned_for: torch.device | None = None,
    ):
        keys: BlockBuffer | RecordBuffer
        values: BlockBuffer | RecordBuffer
        if records:
            keys = RecordBuffer(shape.keys, room.host_tokens, pinned_for)
            values = RecordBuffer(shape.values, room.host_tokens, pinned_for)
        else:
            keys = BlockBuffer(shape.keys, shape.key_dtype, True, room.host_tokens, pinned_for)
            values = BlockBuffer(shape.values, shape.value_dtype, False, room.host_tokens, pinned_for)
        super().__init__(shape, keys, values, budget)

    def __deepcopy__(self, memo: dict) -> "HostStore":
        return self._duplicate(memo)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states; returns all, copied out of the blocks unless the new ones are all there are."""
        only_these = self.num_tokens == 0
        self.extend(keys, values)
        return (keys, values) if only_these else self.read()
