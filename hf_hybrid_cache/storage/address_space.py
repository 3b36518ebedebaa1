"""Address space without memory: pages are committed by the operating system when they are first written."""

import mmap
import sys

import torch

# Linux: do not count the mapping against the overcommit heuristic, which refuses what exceeds RAM in one piece.
_MAP_NORESERVE = 0x4000


def reserve(num_bytes: int) -> torch.Tensor | None:
    """
    Map `num_bytes` of anonymous memory that takes no room until it is written to.

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
    return torch.frombuffer(mapping, dtype=torch.uint8)
