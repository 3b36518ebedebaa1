"""A token buffer in host memory that grows in place."""

import contextlib
import itertools
import math
import mmap
import warnings
import weakref

import torch

from .address_space import reserve
from .growth import GRANULE, grown_capacity
from .token_buffer import TokenBuffer

_MAX_RESERVED_BYTES = 2**40
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class HostBuffer(TokenBuffer):
    """
    States of one layer in host memory.

    Address space for `expected_tokens` is reserved at the first token and memory is committed as tokens are written,
    so growing neither copies nor moves anything. Beyond the reservation, and where the system reserves nothing, it
    grows like any `TokenBuffer`.

    Args:
        pinned_for: page-lock the memory, chunk by chunk as it is used, for copies to and from this CUDA device;
            token-major buffers only. Where the system refuses, one warning is given and copies are slower.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        token_major: bool = False,
        expected_tokens: int = 0,
        pinned_for: torch.device | None = None,
    ):
        assert pinned_for is None or token_major
        self.pinned_for = pinned_for
        self._can_lock = False
        super().__init__(shape, dtype, torch.device("cpu"), token_major, expected_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that hold, or held, tokens: the reserved rest takes no memory."""
        return self._committed_tokens * self.bytes_per_token

    def ensure(self, num_tokens: int, keep: int) -> None:
        if num_tokens > self.capacity:
            reserved = self._reserve(max(num_tokens, self.expected_tokens, 2 * self.capacity))
            release_old = self._release
            self._move_to(reserved if reserved is not None else self._allocate(grown_capacity(num_tokens)), keep)
            release_old()
            self._can_lock = reserved is not None
        if num_tokens > self._committed_tokens:
            self._commit(num_tokens)

    def segments(self, start: int, end: int) -> list[tuple[int, int]]:
        """Tokens `start` to `end`, cut where separately page-locked ranges meet: a copy must not span two of them."""
        cuts = [start, *(cut for cut in self._cuts if start < cut < end), end]
        return list(itertools.pairwise(cuts))

    def _reserve(self, num_tokens: int) -> torch.Tensor | None:
        num_bytes = num_tokens * self.bytes_per_token
        if not 0 < num_bytes <= _MAX_RESERVED_BYTES:
            return None
        with torch.inference_mode(False):
            # Each head's tokens start at a page of their own in the head-major layout.
            raw = reserve(num_bytes, huge_pages=self.token_major)
            return None if raw is None else raw.view(self.dtype).view(self._stored_shape(num_tokens))

    def _adopt(self, data: torch.Tensor) -> None:
        super()._adopt(data)
        self._committed_tokens = 0
        self._cuts: list[int] = []
        self._locked: list[int] = []
        # The data is an argument so that it outlives the page lock.
        self._release = weakref.finalize(self, _unlock, self._locked, self.pinned_for, data)
        self._release.atexit = False

    def _commit(self, num_tokens: int) -> None:
        # What was not reserved does not start at a page, and might share one with other memory.
        if self.pinned_for is None or not self._can_lock:
            self._committed_tokens = num_tokens
            return
        # Locked ranges must not share a page.
        page_tokens = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self.bytes_per_token)
        granule = math.lcm(GRANULE, page_tokens)
        start, end = self._committed_tokens, min(-(-grown_capacity(num_tokens) // granule) * granule, self.capacity)
        address = self._data.data_ptr() + start * self.bytes_per_token
        if _lock(address, (end - start) * self.bytes_per_token, self.pinned_for):
            self._cuts.append(end)
            self._locked.append(address)
        else:
            self._can_lock = False
        self._committed_tokens = end


def _lock(address: int, num_bytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FOR_ALL_DEVICES))
    if error == 0:
        return True
    _clear_error(device)
    warnings.warn(
        f"The system refused to page-lock {num_bytes / 2**20:.0f} MiB of host memory (CUDA error {error}); copies "
        "between it and the device will not overlap with the computation. Raise the limit of locked memory, or pass "
        "pin_memory=False.",
        stacklevel=2,
    )
    return False


def _clear_error(device: torch.device) -> None:
    """Let the error of a refused call end here: CUDA reports it again with the next kernel, whoever launches that."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


def _unlock(addresses: list[int], device: torch.device | None, data: torch.Tensor) -> None:
    if addresses:
        # A copy may still be reading or writing the memory.
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)
