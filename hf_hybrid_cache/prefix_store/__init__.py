"""A store of prompts: no prompt is read twice. What it keeps is listed without importing torch."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .errors import PrefixStoreError, PrefixStoreFolderError
    from .prefix_store import PrefixStore
    from .reuse import Reuse
    from .stored_prompts import StoredPrompt, StoredPrompts

__all__ = ["PrefixStore", "PrefixStoreError", "PrefixStoreFolderError", "Reuse", "StoredPrompt", "StoredPrompts"]

__getattr__ = lazy_names(
    __name__,
    {
        "errors": ("PrefixStoreError", "PrefixStoreFolderError"),
        "stored_prompts": ("StoredPrompt", "StoredPrompts"),
        "prefix_store": ("PrefixStore",),
        "reuse": ("Reuse",),
    },
)
