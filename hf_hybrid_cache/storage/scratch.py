"""Memory that a cache's layers take turns in, for states that are made anew for each use."""

from collections.abc import Iterable, Sequence

import torch

from .kv_store import KVShape, Pair
from .memory.host_memory import require_host_bytes
from .memory.storage_uses import StorageUses


class _Piece:
    def __init__(self, data: torch.Tensor):
        self.data = data
        self._uses = StorageUses(data)

    @property
    def is_free(self) -> bool:
        return not self._uses.is_shared


class Scratch:
    """Lends memory on one device, and lends it again once nobody holds a tensor in it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pieces: list[_Piece] = []

    def __deepcopy__(self, memo: dict) -> "Scratch":
        return Scratch(self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes that the scratch holds, lent or not."""
        return sum(piece.data.nbytes for piece in self._pieces)

    @staticmethod
    def planned_bytes(shape: KVShape, lengths: Sequence[int]) -> int:
        """Return the bytes that would be held after states of a layer were lent with each of `lengths` in turn."""
        return sum(_held_after(num_tokens * size for num_tokens in lengths) for size in shape.token_bytes)

    def lend(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """
        Lend a tensor `[batch, num_kv_heads, tokens, head_dim]` with any content.

        Raises:
            HostMemoryError: it would be in host memory, which has no room for it.
        """
        num_bytes = shape.numel() * dtype.itemsize
        free = [piece for piece in self._pieces if piece.is_free]
        piece = next((piece for piece in free if piece.data.nbytes >= num_bytes), None)
        if piece is None:
            # Pieces that are too small now will be too small again.
            for small in free[:1]:
                self._pieces.remove(small)
            if self._device.type == "cpu":
                require_host_bytes(_with_slack(num_bytes), f"All states of a layer together, {shape[2]:,} tokens need")
            with torch.inference_mode(False):
                piece = _Piece(torch.empty(_with_slack(num_bytes), dtype=torch.uint8, device=self._device))
            self._pieces.append(piece)
        with torch.inference_mode(False):
            return piece.data[:num_bytes].view(dtype).view(shape)

    def lend_states(self, shape: KVShape, num_tokens: int) -> Pair:
        """Lend memory for the keys and the values of so many tokens of a layer, like `lend`."""
        keys, values = (
            self.lend(torch.Size((batch, heads, num_tokens, head_dim)), dtype)
            for (batch, heads, head_dim), dtype in ((shape.keys, shape.key_dtype), (shape.values, shape.value_dtype))
        )
        return keys, values

    def release(self) -> None:
        """Give back the memory that nobody holds."""
        self._pieces = [piece for piece in self._pieces if not piece.is_free]


def _held_after(sizes: Iterable[int]) -> int:
    """Return the bytes of a piece after a tensor was lent with each of `sizes`, in bytes, in turn."""
    held = 0
    for num_bytes in sizes:
        if num_bytes > held:
            held = _with_slack(num_bytes)
    return held


def _with_slack(num_bytes: int) -> int:
    """Add an eighth, so that a tensor that grows is rarely too large."""
    return num_bytes + num_bytes // 8
