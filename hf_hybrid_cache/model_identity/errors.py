"""The error of a model whose states are not a function of what can be read from it."""

from ..errors import HybridCacheError


class ModelIdentityError(HybridCacheError, ValueError):
    """The states of a model depend on more than its identity would tell; the message says on what."""
