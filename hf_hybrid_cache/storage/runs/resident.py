"""Keys and values on the compute device."""

import torch

from ..buffers.host_buffer import HostBuffer
from ..buffers.token_buffer import TokenBuffer
from ..kv_store import KVShape, Pair
from ..memory.growth import GRANULE, InitialCapacity
from ..memory.host_memory import HostBudget
from .run import Run


class Resident(Run):
    """
    Keys and values on the compute device, in the layout that attention reads.

    On the CPU growing costs nothing. On an accelerator it copies one tensor of one layer, once in thousands of tokens,
    and never up to `capacity.device_tokens`.

    Args:
        shape: of the states.
        capacity: of the buffers before the first token.
        budget: asked before host memory is used.
        packed: states are packed blocks, one after the other.
    """

    def __init__(self, shape: KVShape, capacity: InitialCapacity, budget: HostBudget, packed: bool = False):
        entry_tokens = GRANULE if packed else 1

        def buffer(states: tuple[int, int, int], dtype: torch.dtype) -> TokenBuffer:
            if shape.device.type == "cpu":
                return HostBuffer(states, dtype, packed, capacity.host_tokens, entry_tokens)
            return TokenBuffer(states, dtype, shape.device, packed, capacity.device_tokens, entry_tokens)

        super().__init__(shape, buffer(shape.keys, shape.key_dtype), buffer(shape.values, shape.value_dtype), budget)

    def __deepcopy__(self, memo: dict) -> "Resident":
        return self._duplicate(memo)

    @property
    def capacity(self) -> int:
        """Number of tokens that there is memory for."""
        return min(self.keys.capacity, self.values.capacity)

    def remove(self, start: int, end: int) -> None:
        """Remove tokens `start` to `end` and move later ones into their places, in pieces that do not overlap."""
        count = end - start
        self._leave_to_holders(self.num_entries)
        with self._changing():
            for at in range(end, self.num_entries, count):
                keys, values = self.read_range(at, min(at + count, self.num_entries))
                self.keys.write(at - count, keys)
                self.values.write(at - count, values)
            self._set_length(self.num_entries - count)

    def truncate(self, num_tokens: int) -> None:
        if num_tokens < self.num_entries:
            self._leave_to_holders(num_tokens)
        super().truncate(num_tokens)

    def _leave_to_holders(self, keep: int) -> None:
        for buffer in self.buffers():
            buffer.leave_to_holders(keep)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        self.write(keys, values)
        return self.read()
