"""A store of prompts: no prompt is read twice."""

from .errors import PrefixStoreError
from .kept_prompts import KeptPrompt
from .prefix_store import PrefixStore
from .reuse import Reuse

__all__ = ["KeptPrompt", "PrefixStore", "PrefixStoreError", "Reuse"]
