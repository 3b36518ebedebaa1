"""Keys and values on the compute device."""

from ..kv_shape import KVShape
from ..memory.buffer_memory import DeviceMemory, HostMemory
from ..memory.growth import GRANULE, InitialCapacity
from ..memory.host_memory import HostBudget
from .run import Run
from .token_buffer import TokenBuffer


class Resident(Run):
    """
    Keys and values on the compute device, in the layout that attention reads.

    On the CPU growing costs nothing. On an accelerator it copies one tensor of one layer, once in thousands of tokens,
    and never up to `capacity.device_tokens`.

    Args:
        capacity: of the buffers before the first token.
        packed: states are packed blocks, one after the other.
    """

    def __init__(self, shape: KVShape, capacity: InitialCapacity, budget: HostBudget, packed: bool = False):
        entry_tokens = GRANULE if packed else 1
        memory: DeviceMemory | HostMemory = DeviceMemory(shape.device, capacity.device_tokens, entry_tokens)
        if shape.device.type == "cpu":
            memory = HostMemory(capacity.host_tokens, entry_tokens, in_rows=packed)
        keys = TokenBuffer(shape.keys, shape.key_dtype, memory, token_major=packed)
        values = TokenBuffer(shape.values, shape.value_dtype, memory, token_major=packed)
        super().__init__(shape, keys, values, budget)

    @property
    def capacity(self) -> int:
        """Number of tokens that there is memory for."""
        return min(self.keys.capacity, self.values.capacity)

    def remove(self, start: int, end: int) -> None:
        """Remove tokens `start` to `end` and move later ones into their places, in pieces that do not overlap."""
        count = end - start
        self.leave_to_holders(self.num_entries)
        with self._changing():
            for at in range(end, self.num_entries, count):
                keys, values = self.read_range(at, min(at + count, self.num_entries))
                self.keys.write(at - count, keys)
                self.values.write(at - count, values)
            self.num_entries -= count

    def truncate(self, num_entries: int) -> None:
        if num_entries < self.num_entries:
            self.leave_to_holders(num_entries)
        super().truncate(num_entries)

    def leave_to_holders(self, keep: int) -> None:
        """Move to other memory, with the first `keep` entries, if somebody holds what was read."""
        for buffer in self.buffers():
            buffer.leave_to_holders(keep)
