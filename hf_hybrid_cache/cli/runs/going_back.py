"""Whether a cache can go back to fewer tokens."""

from transformers.cache_utils import Cache


def can_go_back(cache: Cache) -> bool:
    """Whether the last tokens of a cache can be removed; a layer with a sliding window has forgotten earlier ones."""
    return cache.is_croppable and not any(cache.is_sliding)
