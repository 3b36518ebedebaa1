"""Saving a filled cache to a file, and loading it."""

from .checkpoint import Checkpoint
from .errors import CacheFileError
from .model_traits import traits_of
from .reading import CacheFile, saved_token_ids
from .token_prefix import first_difference
from .writing import require_place, save_layers

__all__ = [
    "CacheFile",
    "CacheFileError",
    "Checkpoint",
    "first_difference",
    "require_place",
    "save_layers",
    "saved_token_ids",
    "traits_of",
]
