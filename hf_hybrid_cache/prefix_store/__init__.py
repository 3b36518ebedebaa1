"""A store of prompts: no prompt is read twice. What it keeps is listed without importing torch."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .errors import PrefixStoreError as PrefixStoreError
    from .errors import PrefixStoreFolderError as PrefixStoreFolderError
    from .prefix_store import PrefixStore as PrefixStore
    from .reuse import Reuse as Reuse
    from .stored_prompts import StoredPrompt as StoredPrompt
    from .stored_prompts import StoredPrompts as StoredPrompts

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "errors": ("PrefixStoreError", "PrefixStoreFolderError"),
        "stored_prompts": ("StoredPrompt", "StoredPrompts"),
        "prefix_store": ("PrefixStore",),
        "reuse": ("Reuse",),
    },
)
