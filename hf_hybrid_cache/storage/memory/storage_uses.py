"""A count of the tensors that share memory with its owner."""

import torch


class StorageUses:
    """
    Counts the tensors that share a piece of memory: views, slices and arrays of NumPy, however they were made.

    Args:
        data: a tensor in it. Tensors that share it now belong to the owner; those that come later are others.
    """

    def __init__(self, data: torch.Tensor):
        self._storage = data.untyped_storage()
        self._of_owner = self._count()

    @property
    def is_shared(self) -> bool:
        """Whether somebody beside the owner holds such a tensor."""
        return self._count() > self._of_owner

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)
