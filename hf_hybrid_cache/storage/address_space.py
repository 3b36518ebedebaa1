"""Address space without memory: pages are committed by the operating system when they are first written."""

import contextlib
import mmap
import sys

import torch

# Linux: do not count the mapping against the overcommit heuristic, which refuses what exceeds RAM in one piece.
_MAP_NORESERVE = 0x4000


def reserve(num_bytes: int, huge_pages: bool = True) -> torch.Tensor | None:
    """
    Map `num_bytes` of anonymous memory that takes no room until it is written to.

    Args:
        num_bytes: of address space.
        huge_pages: leave it to the system whether to commit 2 MiB at a time; `False` where many places are written
            first, each of which would take so much.

    Returns:
        uint8 tensor of `num_bytes`, zeros, page aligned; `None` where the system commits at once (Windows) or refuses
        (an address space limit, strict overcommit), so that the caller allocates only what it needs.
    """
    if sys.platform == "win32":
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= _MAP_NORESERVE
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError):
        return None
    if sys.platform == "linux" and not huge_pages:
        with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
