"""Digests of tensors' bytes, wherever they are and in whatever order."""

import math
from collections.abc import Sequence

import torch

from ..kernels import PIECE_BYTES, digest_memories

# What is copied at a time to be read.
_COPIED_BYTES = 64 * PIECE_BYTES


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """
    Return the digest of each tensor's numbers in the order of its indices, the same for any strides and device.

    Args:
        tensors: plain, with their numbers in memory.
    """
    read = iter(digest_memories([_memory(tensor) for tensor in tensors if _is_in_order(tensor)]))
    return [next(read) if _is_in_order(tensor) else _copied(tensor) for tensor in tensors]


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor can be read where they are."""
    return tensor.is_cpu and tensor.is_contiguous()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _copied(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor that is copied in parts to be read."""
    if not tensor.numel():
        return b""
    rows = tensor if tensor.dim() else tensor[None]
    row_bytes = rows[0].nbytes
    # Digests of copies follow each other if all but the last have whole pieces.
    step = PIECE_BYTES // math.gcd(PIECE_BYTES, row_bytes)
    step *= max(1, _COPIED_BYTES // (step * row_bytes))
    digests = []
    for first in range(0, len(rows), step):
        copied = rows[first : first + step].contiguous().cpu()
        digests += digest_memories([_memory(copied)])
    return b"".join(digests)
