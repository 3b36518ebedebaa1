"""The base class of the exceptions of this package."""


class HybridCacheError(Exception):
    """The base of all errors of this package; each also extends a built-in exception, or one of torch's."""
