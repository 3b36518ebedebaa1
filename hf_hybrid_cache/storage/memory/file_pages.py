"""Pages of a mapped file, given back as soon as they have been read."""

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch

# Bits of an entry of /proc/self/pagemap. Entries are signed: the highest bit says that a page is present.
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
_ENTRY_BYTES = 8


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
