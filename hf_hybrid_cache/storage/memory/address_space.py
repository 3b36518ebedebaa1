"""Pages of memory: address space whose pages are committed when they are first written, and pages of mapped files."""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch

# Linux: keep the mapping out of the overcommit heuristic, which refuses a single mapping larger than RAM.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 2**20
# Bits of an entry of /proc/self/pagemap. Entries are signed: the highest bit says that a page is present.
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
_ENTRY_BYTES = 8


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


def give_back_file_pages(tensor: torch.Tensor) -> int:
    """
    Release the resident memory of a tensor in a mapped file. The next read takes it from the file again.

    Nothing is released if a page was written to, or is not the file's. So nothing is lost, whoever else holds the
    tensor.

    Args:
        tensor: in host memory.

    Returns:
        Bytes that were released; 0 also if the system does not describe its pages.
    """
    if sys.platform != "linux" or not tensor.is_contiguous():
        return 0
    # Keep pages that the tensor shares with other memory.
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    if last <= first or not _are_as_in_file(first, last):
        return 0
    num_bytes = (last - first) * mmap.PAGESIZE
    has_failed = _madvise()(first * mmap.PAGESIZE, num_bytes, mmap.MADV_DONTNEED)
    return 0 if has_failed else num_bytes


def _are_as_in_file(first: int, last: int) -> bool:
    """Return whether all of these pages that are present are the file's, and none is swapped."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), (last - first) * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return False
    if len(entries) != (last - first) * _ENTRY_BYTES:
        return False
    pages = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    is_present, is_of_file, is_swapped = pages < 0, pages & _OF_FILE != 0, pages & _SWAPPED != 0
    return bool(torch.where(is_present, is_of_file, ~is_swapped).all())


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    # Python's `madvise` is a method of mappings that Python made.
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
