"""Keys and values kept in host memory in blocks, for attention on the CPU."""

import torch

from .block_buffer import BlockBuffer
from .growth import Room
from .host_memory import HostBudget
from .kv_store import KVShape, KVStore


class HostStore(KVStore):
    """
    Keys and values in host memory, in the blocks that the kernels read, of a model that computes there too.

    Args:
        shape: of the states.
        room: to make before the first token.
        budget: asked before host memory is used.
        pinned_for: page-lock the memory for copies to and from this CUDA device.

    Attributes:
        version: counts changes of what is stored.
    """

    keys: BlockBuffer
    values: BlockBuffer

    def __init__(self, shape: KVShape, room: Room, budget: HostBudget, pinned_for: torch.device | None = None):
        keys = BlockBuffer(shape.keys, shape.key_dtype, True, room.host_tokens, pinned_for)
        values = BlockBuffer(shape.values, shape.value_dtype, False, room.host_tokens, pinned_for)
        super().__init__(shape, keys, values, budget)
        self.version = 0

    def __deepcopy__(self, memo: dict) -> "HostStore":
        return self._duplicate(memo)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states; returns all, copied out of the blocks unless the new ones are all there are."""
        only_these = self.num_tokens == 0
        self.extend(keys, values)
        return (keys, values) if only_these else self.read()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.num_tokens + keys.shape[2]
        self._make_room(end)
        self.keys.write(self.num_tokens, keys)
        self.values.write(self.num_tokens, values)
        self._set_length(end)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.read(self.num_tokens), self.values.read(self.num_tokens)

    def truncate(self, num_tokens: int) -> None:
        self._set_length(num_tokens)

    def select_batch(self, indices: torch.Tensor) -> None:
        super().select_batch(indices)
        self.version += 1

    def close(self) -> None:
        self.version += 1

    def _set_length(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.version += 1
