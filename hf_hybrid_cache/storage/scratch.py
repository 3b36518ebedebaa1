"""Memory that a cache's layers take turns in, for states that are made anew for each use."""

from collections.abc import Sequence

import torch

from .kv_shape import KVShape, Pair
from .memory.buffer_memory import StorageUses
from .memory.host_memory import require_host_bytes


class Scratch:
    """
    Lends memory on one device, and lends it again once nobody holds a tensor in it.

    Attributes:
        pieces: the memory that there is.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.pieces: list[tuple[torch.Tensor, StorageUses]] = []

    def __deepcopy__(self, memo: dict) -> "Scratch":
        return Scratch(self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes that the scratch holds, lent or not."""
        return sum(data.nbytes for data, _ in self.pieces)

    @staticmethod
    def planned_bytes(shape: KVShape, lengths: Sequence[int]) -> int:
        """Return the bytes that would be held after states of a layer were lent with each of `lengths` in turn."""
        held = [0, 0]
        for num_tokens in lengths:
            for part, token_bytes in enumerate(shape.token_bytes):
                if num_tokens * token_bytes > held[part]:
                    held[part] = _with_slack(num_tokens * token_bytes)
        return sum(held)

    def lend(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """
        Lend a tensor `[batch, num_kv_heads, tokens, head_dim]` with any content.

        Raises:
            HostMemoryError: it would be in host memory, which has no room for it.
        """
        num_bytes = shape.numel() * dtype.itemsize
        free = [piece for piece in self.pieces if not piece[1].is_shared]
        data = next((data for data, _ in free if data.nbytes >= num_bytes), None)
        if data is None:
            # Pieces that are too small now will be too small again.
            if free:
                self.pieces = [piece for piece in self.pieces if piece is not free[0]]
            if self._device.type == "cpu":
                require_host_bytes(_with_slack(num_bytes), f"All states of a layer together, {shape[2]:,} tokens need")
            with torch.inference_mode(False):
                data = torch.empty(_with_slack(num_bytes), dtype=torch.uint8, device=self._device)
            self.pieces.append((data, StorageUses(data)))
        with torch.inference_mode(False):
            return data[:num_bytes].view(dtype).view(shape)

    def lend_states(self, shape: KVShape, num_tokens: int) -> Pair:
        """Lend memory for the keys and the values of so many tokens of a layer, like `lend`."""
        keys, values = (
            self.lend(torch.Size((batch, heads, num_tokens, head_dim)), dtype)
            for (batch, heads, head_dim), dtype in ((shape.keys, shape.key_dtype), (shape.values, shape.value_dtype))
        )
        return keys, values

    def release(self) -> None:
        """Give back the memory that nobody holds."""
        self.pieces = [piece for piece in self.pieces if piece[1].is_shared]


def _with_slack(num_bytes: int) -> int:
    """Add an eighth, so that a tensor that grows is rarely too large."""
    return num_bytes + num_bytes // 8
