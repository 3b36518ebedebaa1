"""A token buffer in host memory that grows in place."""

import torch

from ..memory.address_space import AddressSpace, reserve
from ..memory.host_memory import HostMemoryError, require_host_bytes
from ..memory.memory_limits import address_space_is_limited, tightest_limit
from .token_buffer import TokenBuffer

_MAX_RESERVED_BYTES = 2**40


class HostBuffer(TokenBuffer):
    """
    States of one layer in host memory, in a layout that torch reads.

    Address space for `expected_tokens` is reserved at the first token and memory is committed as tokens are written,
    so growing neither copies nor moves anything. Beyond the reservation, and where address space is limited or the
    system reserves none, what is stored is copied when the capacity grows.
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
        """Bytes of memory that hold, or held, tokens, without reserved address space."""
        return self._committed_tokens * self.bytes_per_token

    def ensure(self, num_tokens: int, keep: int) -> None:
        if num_tokens <= self._committed_tokens:
            return
        self.ensure_capacity(num_tokens, keep)
        self._commit(num_tokens)

    def ensure_capacity(self, num_tokens: int, keep: int) -> None:
        """
        Grow the capacity to at least `num_tokens` without committing memory; keep the first `keep` tokens.

        Raises:
            HostMemoryError: the system refused the memory.
        """
        if num_tokens > self.capacity:
            self._grow(num_tokens, keep)

    def moved_bytes(self, num_tokens: int) -> int:
        """Return the bytes that are held twice while the capacity grows to `num_tokens`."""
        return self.num_bytes if num_tokens > self.capacity else 0

    def _memory_for(self, num_tokens: int) -> int:
        return num_tokens

    def _grow(self, num_tokens: int, keep: int) -> None:
        self._take_memory(num_tokens, max(num_tokens, self.expected_tokens, 2 * self.capacity), keep)

    def _take_other_memory(self, keep: int) -> None:
        committed = self._committed_tokens
        require_host_bytes(keep * self.bytes_per_token, f"To keep {keep:,} tokens beside states that are held needs")
        self._take_memory(committed, max(committed, self.capacity), keep)
        self._commit(committed)

    def _take_memory(self, num_tokens: int, whole: int, keep: int) -> None:
        """Move the first `keep` tokens to address space for `whole`; if that is refused, to memory for `num_tokens`."""
        for size in [num_tokens] if address_space_is_limited() else [whole, num_tokens]:
            space = self._reserve(size)
            if space is not None:
                with torch.inference_mode(False):
                    data = space.data.view(self.dtype).view(self._stored_shape(size))
                break
        else:
            data = self._allocate(num_tokens)
        if space is not None:
            self._prepare(space, keep)
        self._move_to(data, keep)
        self._space = space

    def _prepare(self, space: AddressSpace, num_tokens: int) -> None:
        """Prepare new address space for the first `num_tokens`, which are copied into it next."""

    def _reserve(self, num_tokens: int) -> AddressSpace | None:
        """Reserve address space for so many tokens; return `None` if the system refuses it."""
        num_bytes = self._stored_shape(num_tokens).numel() * self.dtype.itemsize
        if not 0 < num_bytes <= _MAX_RESERVED_BYTES:
            return None
        with torch.inference_mode(False):
            return reserve(num_bytes)

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        try:
            return super()._allocate(num_tokens)
        except RuntimeError as error:  # torch has no type of its own for it
            limit = tightest_limit()
            num_bytes = self._stored_shape(num_tokens).numel() * self.dtype.itemsize
            raise HostMemoryError(
                f"The system refused {num_bytes / 2**30:.2f} GiB of host memory in one piece; {limit.free / 2**30:.2f} "
                f"GiB are free{limit.where}. Use a shorter context, a smaller batch or fewer beams."
            ) from error

    def _commit(self, num_tokens: int) -> None:
        """Note that memory up to `num_tokens` is about to be written."""
        self._committed_tokens = num_tokens

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._committed_tokens = 0
