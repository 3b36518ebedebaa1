"""Errors of a prefix store."""

from ..errors import HybridCacheError


class PrefixStoreError(HybridCacheError, ValueError):
    """A prompt of this kind, or of this model or cache, cannot be kept; the message says why, and the way out."""
