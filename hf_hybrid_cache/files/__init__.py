"""Files of tensors with checksums: of saved caches, and of a prefix store."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .cache_file import CacheFile as CacheFile
    from .cache_file import save_layers as save_layers
    from .cache_file import saved_token_ids as saved_token_ids
    from .tensor_file import CacheFileError as CacheFileError

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "cache_file": ("CacheFile", "save_layers", "saved_token_ids"),
        "tensor_file": ("CacheFileError",),
    },
)
