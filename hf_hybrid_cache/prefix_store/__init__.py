"""A store of prompts: no prompt is read twice. What it keeps is listed without importing torch."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .errors import PrefixStoreError
    from .kept_prompts import KeptPrompt, KeptPrompts
    from .prefix_store import PrefixStore
    from .reuse import Reuse

__all__ = ["KeptPrompt", "KeptPrompts", "PrefixStore", "PrefixStoreError", "Reuse"]

__getattr__ = lazy_names(
    __name__,
    {
        "errors": ("PrefixStoreError",),
        "kept_prompts": ("KeptPrompt", "KeptPrompts"),
        "prefix_store": ("PrefixStore",),
        "reuse": ("Reuse",),
    },
)
