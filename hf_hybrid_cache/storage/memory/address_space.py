"""Address space without memory: pages are committed by the operating system when they are first written."""

import contextlib
import ctypes
import mmap
import sys

import torch

# Linux: keep the mapping out of the overcommit heuristic, which refuses a single mapping larger than RAM.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 2**20


class AddressSpace:
    """
    Anonymous memory that the system commits when it is written to, in pages of 4 KiB unless asked otherwise.

    Attributes:
        data: uint8 tensor, zeros, page aligned. Keeps the memory alive by itself.
    """

    def __init__(self, mapping: mmap.mmap):
        self._mapping = mapping
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        self._huge_until = -self.data.data_ptr() % _HUGE_PAGE
        self._advise("MADV_NOHUGEPAGE", 0, len(mapping))

    def use_huge_pages(self, written: int, end: int) -> None:
        """
        Use pages of 2 MiB for the first `end` bytes; `written` of them are written, the others soon will be.

        Only pages that lie inside `end` are made huge, so that no memory is taken that would not be used.
        """
        first = self._huge_until
        last = end - (end - first) % _HUGE_PAGE
        if last <= first:
            return
        self._advise("MADV_HUGEPAGE", first, last - first)
        # Pages that exist already are only joined on request, and only since Linux 6.1.
        for page in range(first, min(written, last), _HUGE_PAGE):
            self._advise(_MADV_COLLAPSE, page, _HUGE_PAGE)
        self._huge_until = last

    def map_file(self, file: int, offset: int, num_bytes: int) -> bool:
        """
        Map the first `num_bytes` to an open file, from `offset` on. Writes to them do not reach the file.

        Returns:
            False if the system cannot do that (not Linux, or `offset` is not the start of a page). Do not use the space
            then.
        """
        if sys.platform != "linux" or offset % mmap.ALLOCATIONGRANULARITY:
            return False
        # Python's mmap takes no address.
        map_memory = ctypes.CDLL(None).mmap
        map_memory.restype = ctypes.c_void_p
        map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        address = self.data.data_ptr()
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        if map_memory(address, num_bytes, protection, flags, file, offset) != address:
            return False
        # Pages of the file are shared with the page cache; huge pages would be copies.
        self._huge_until = num_bytes + -(address + num_bytes) % _HUGE_PAGE
        return True

    def _advise(self, advice: str | int, start: int, num_bytes: int) -> None:
        # Systems that do not know this advice, or have huge pages switched off, may ignore it.
        number = getattr(mmap, advice, None) if isinstance(advice, str) else advice
        if sys.platform == "linux" and number is not None:
            with contextlib.suppress(OSError):
                self._mapping.madvise(number, start, num_bytes)


def reserve(num_bytes: int) -> AddressSpace | None:
    """
    Map `num_bytes` of address space.

    Returns:
        None where the system commits at once (Windows) or refuses (an address space limit, strict overcommit).
    """
    if sys.platform == "win32":
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= _MAP_NORESERVE
    try:
        return AddressSpace(mmap.mmap(-1, num_bytes, flags=flags))
    except (OSError, OverflowError):
        return None


def huge_page_memory(num_bytes: int) -> torch.Tensor:
    """Allocate uint8 `[num_bytes]` for data that is written once and read often, in pages of 2 MiB if there are any."""
    space = reserve(num_bytes) if num_bytes >= _HUGE_PAGE else None
    if space is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    space.use_huge_pages(0, num_bytes)
    return space.data
