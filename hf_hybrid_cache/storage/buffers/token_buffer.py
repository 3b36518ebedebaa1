"""Memory for the keys or the values of one layer, written token after token and read as one tensor."""

import copy
from collections.abc import Iterable
from typing import Self

import torch

from ..memory.growth import grown_capacity
from ..memory.storage_uses import StorageUses

_COPY_BYTES = 16 * 2**20


class TokenBuffer:
    """
    States of one layer on one device, seen as `[batch, num_kv_heads, tokens, head_dim]`.

    Appending writes the new tokens only. When the capacity is used up, it grows in chunks, which here means one
    copy of what this one tensor holds, once in thousands of tokens; `HostBuffer` grows without any.

    The buffer does not know how many of its tokens are valid: its owner says so in every call.

    Args:
        shape: `(batch, num_kv_heads, head_dim)`.
        dtype: type of the stored states.
        device: device of the memory.
        token_major: store as `[tokens, batch, heads, head_dim]`, so that any run of tokens is contiguous (for copies
            between devices), instead of `[batch, heads, tokens, head_dim]` (for attention).
        expected_tokens: initial capacity.
        entry_tokens: tokens that one entry stands for; 64 if an entry is a packed block. Sizes are in
            entries everywhere.

    Attributes:
        is_torn: something has ended the exchange of its memory half-way.
    """

    is_torn = False
    _takes_locked = False  # page-locked memory, from torch

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool = False,
        expected_tokens: int = 0,
        entry_tokens: int = 1,
    ):
        self.shape, self.dtype, self.device = shape, dtype, device
        self.token_major = token_major
        self.expected_tokens = expected_tokens
        self.entry_tokens = entry_tokens
        self._adopt(self._allocate(0))

    @property
    def capacity(self) -> int:
        """Number of tokens that can be written without growing."""
        return self._seen.shape[2]

    @property
    def bytes_per_token(self) -> int:
        batch, heads, head_dim = self.shape
        return batch * heads * head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the buffer holds."""
        return self._data.numel() * self._data.element_size()

    def ensure(self, num_tokens: int, keep: int) -> None:
        """Grow the capacity to at least `num_tokens`; keep the first `keep` tokens."""
        if num_tokens > self.capacity:
            self._move_to(self._allocate(self._memory_for(num_tokens)), keep)

    def planned_bytes(self, sizes: Iterable[int]) -> int:
        """Return the bytes that the empty buffer would hold after growing to each of `sizes`; nothing is allocated."""
        capacity = 0
        for num_tokens in sizes:
            if num_tokens > capacity:
                capacity = self._memory_for(num_tokens)
        return capacity * self.bytes_per_token

    def write(self, start: int, states: torch.Tensor) -> None:
        """AnyStore `states`, `[batch, heads, tokens, head_dim]`, from token `start` on, within the capacity."""
        self._seen.narrow(2, start, states.shape[2]).copy_(states)

    def read_range(self, start: int, end: int) -> torch.Tensor:
        """Return tokens `start` to `end`, `[batch, heads, end - start, head_dim]`; a view if the layout allows one."""
        return self._seen.narrow(2, start, end - start)

    def read(self, num_tokens: int) -> torch.Tensor:
        """Return the first `num_tokens`, like `read_range`."""
        return self.read_range(0, num_tokens)

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds a tensor in this memory, such as a slice of what was read."""
        return self._uses.is_shared

    def leave_to_holders(self, keep: int) -> None:
        """Move to other memory, with the first `keep` tokens, if somebody holds a tensor in this one."""
        if self.is_lent:
            self._take_other_memory(keep)

    def select(self, indices: torch.Tensor, num_tokens: int) -> Self:
        """
        Return a buffer of the first `num_tokens`, whose sequence `i` is sequence `indices[i]` of this one.

        It works in place, a few MiB at a time, if the batch size stays and nobody holds a tensor in this memory. This
        buffer must not be used afterwards.
        """
        batch, heads, head_dim = self.shape
        target = self
        if len(indices) != batch or self.is_lent:
            target = self._emptied((len(indices), heads, head_dim))
            target.ensure(num_tokens, keep=0)
        step = max(1, _COPY_BYTES // max(1, self.bytes_per_token))
        for start in range(0, num_tokens, step):
            piece = self._seen[:, :, start : min(start + step, num_tokens)]
            target.write(start, piece.index_select(0, indices))
        return target

    def duplicate(self, num_tokens: int) -> "TokenBuffer":
        """Return an independent copy of the first `num_tokens`."""
        twin = self._emptied(self.shape)
        twin.ensure(num_tokens, keep=0)
        twin.write(0, self.read(num_tokens))
        return twin

    def _memory_for(self, num_tokens: int) -> int:
        """Return the number of tokens that there is memory for after growing to `num_tokens`."""
        return max(grown_capacity(num_tokens, self.entry_tokens), self.expected_tokens)

    def _emptied(self, shape: tuple[int, int, int]) -> Self:
        twin = copy.copy(self)
        twin.shape = shape
        twin._adopt(twin._allocate(0))
        return twin

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        # Inference tensors could not be written to outside inference mode later on.
        with torch.inference_mode(False):
            shape = self._stored_shape(num_tokens)
            return torch.empty(shape, dtype=self.dtype, device=self.device, pin_memory=self._takes_locked)

    def _stored_shape(self, num_tokens: int) -> torch.Size:
        batch, heads, head_dim = self.shape
        if self.token_major:
            return torch.Size((num_tokens, batch, heads, head_dim))
        return torch.Size((batch, heads, num_tokens, head_dim))

    def _move_to(self, data: torch.Tensor, keep: int) -> None:
        """Copy the first `keep` tokens, and only then give up the memory that held them."""
        self._as_seen(data).narrow(2, 0, keep).copy_(self._seen.narrow(2, 0, keep))
        self._exchange(data)

    def _take_other_memory(self, keep: int) -> None:
        self._move_to(self._allocate(self.capacity), keep)

    def _exchange(self, data: torch.Tensor) -> None:
        self.is_torn = True
        self._adopt(data)
        self.is_torn = False

    def _adopt(self, data: torch.Tensor) -> None:
        self._data = data
        self._seen = self._as_seen(data)
        self._uses = StorageUses(data)

    def _as_seen(self, data: torch.Tensor) -> torch.Tensor:
        return data.permute(1, 2, 0, 3) if self.token_major else data
