"""A token buffer in host memory that grows in place."""

import torch

from .address_space import AddressSpace, reserve
from .growth import grown_capacity
from .token_buffer import TokenBuffer

_MAX_RESERVED_BYTES = 2**40


class HostBuffer(TokenBuffer):
    """
    States of one layer in host memory, in a layout that torch reads.

    Address space for `expected_tokens` is reserved at the first token and memory is committed as tokens are written,
    so growing neither copies nor moves anything. Beyond the reservation, and where the system reserves nothing, it
    grows like any `TokenBuffer`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        token_major: bool = False,
        expected_tokens: int = 0,
        entry_tokens: int = 1,
    ):
        self._space: AddressSpace | None = None
        super().__init__(shape, dtype, torch.device("cpu"), token_major, expected_tokens, entry_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that hold, or held, tokens: the reserved rest takes no memory."""
        return self._committed_tokens * self.bytes_per_token

    def ensure(self, num_tokens: int, keep: int) -> None:
        if num_tokens <= self._committed_tokens:
            return
        if num_tokens > self.capacity:
            self._grow(num_tokens, keep)
        self._commit(num_tokens)

    def _memory_for(self, num_tokens: int) -> int:
        return num_tokens

    def _grow(self, num_tokens: int, keep: int) -> None:
        shape = self._stored_shape(max(num_tokens, self.expected_tokens, 2 * self.capacity))
        num_bytes = shape.numel() * self.dtype.itemsize
        self._space = None
        if 0 < num_bytes <= _MAX_RESERVED_BYTES:
            with torch.inference_mode(False):
                self._space = reserve(num_bytes)
        if self._space is None:
            self._move_to(self._allocate(grown_capacity(num_tokens, self.entry_tokens)), keep)
        else:
            with torch.inference_mode(False):
                self._move_to(self._space.data.view(self.dtype).view(shape), keep)

    def _commit(self, num_tokens: int) -> None:
        """Note that memory up to `num_tokens` is about to be written."""
        self._committed_tokens = num_tokens

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._committed_tokens = 0
