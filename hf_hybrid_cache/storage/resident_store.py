"""Keys and values kept on the compute device."""

import torch

from .growth import Room
from .host_buffer import HostBuffer
from .host_memory import HostBudget
from .kv_store import KVShape, KVStore
from .token_buffer import TokenBuffer


class ResidentStore(KVStore):
    """
    Keys and values on the compute device, in the layout that attention reads.

    On the CPU growing costs nothing. On an accelerator it copies one tensor of one layer, once in thousands of tokens,
    and never up to `room.device_tokens`.
    """

    def __init__(self, shape: KVShape, room: Room, budget: HostBudget):
        def buffer(states: tuple[int, int, int], dtype: torch.dtype) -> TokenBuffer:
            if shape.device.type == "cpu":
                return HostBuffer(states, dtype, expected_tokens=room.host_tokens)
            return TokenBuffer(states, dtype, shape.device, expected_tokens=room.device_tokens)

        super().__init__(shape, buffer(shape.keys, shape.key_dtype), buffer(shape.values, shape.value_dtype), budget)

    def __deepcopy__(self, memo: dict) -> "ResidentStore":
        return self._duplicate(memo)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.extend(keys, values)
        return self.read()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.num_tokens + keys.shape[2]
        self._make_room(end)
        self.keys.write(self.num_tokens, keys)
        self.values.write(self.num_tokens, values)
        self.num_tokens = end

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.read(self.num_tokens), self.values.read(self.num_tokens)
