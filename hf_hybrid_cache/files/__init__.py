"""Files of tensors with checksums: of saved caches, and of a prefix store."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .cache_file import CacheFile, save_layers, saved_token_ids
    from .tensor_file import CacheFileError

__all__ = ["CacheFile", "CacheFileError", "save_layers", "saved_token_ids"]

__getattr__ = lazy_names(
    __name__,
    {
        "cache_file": ("CacheFile", "save_layers", "saved_token_ids"),
        "tensor_file": ("CacheFileError",),
    },
)
