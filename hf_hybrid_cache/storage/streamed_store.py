"""Keys and values kept in host memory and streamed to the compute device for each use."""

import copy

import torch

from .growth import Room
from .host_buffer import HostBuffer
from .host_memory import HostBudget
from .kv_store import KVShape, KVStore
from .staging import Staging
from .streams import Event


class StreamedStore(KVStore):
    """
    Keys and values in host memory, which is the truth about them; the device holds copies in staging slots.

    What `append` and `read` return stays valid as long as it is held, itself and not a slice of it, and the tokens are
    stored.

    Args:
        shape: of the states.
        room: to make before the first token.
        budget: asked before host memory is used.
        staging: the slots of the compute device, shared by its layers.
        resident: keep the device copy for good.
        pinned: page-lock the host memory.
    """

    keys: HostBuffer
    values: HostBuffer

    def __init__(
        self,
        shape: KVShape,
        room: Room,
        budget: HostBudget,
        staging: Staging,
        resident: bool = False,
        pinned: bool = False,
    ):
        pinned_for = shape.device if pinned else None
        keys = HostBuffer(shape.keys, shape.key_dtype, True, room.host_tokens, pinned_for)
        values = HostBuffer(shape.values, shape.value_dtype, True, room.host_tokens, pinned_for)
        super().__init__(shape, keys, values, budget)
        self.resident = resident
        self.staging = staging
        # The copy to the host of the newest tokens.
        self.saved: Event = None
        staging.register(self)

    def __deepcopy__(self, memo: dict) -> "StreamedStore":
        self.settle()
        twin = self._duplicate(memo)
        twin.saved = None
        twin.staging = copy.deepcopy(self.staging, memo)
        return twin

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.num_tokens, self.num_tokens + keys.shape[2]
        if end > min(self.keys.capacity, self.values.capacity):
            # Growing copies host memory on this thread, so the newest tokens must have arrived there.
            self.settle()
        self._make_room(end)
        self.staging.count_use(self)
        slot = self.staging.open(self, end)
        slot.write(start, keys, values)
        self.saved = self.staging.save(self, slot, start, end)
        self.num_tokens = slot.num_tokens = end
        self.staging.prefetch_after(self)
        return slot.lend(end)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.staging.open(self, self.num_tokens).lend(self.num_tokens)

    def select_batch(self, indices: torch.Tensor) -> None:
        indices = indices.to("cpu")
        if torch.equal(indices, torch.arange(self.shape.batch)):
            return
        self.settle()
        super().select_batch(indices)
        self.staging.invalidate(self)

    def settle(self) -> None:
        self.staging.settle(self)

    def close(self) -> None:
        self.staging.release(self)
