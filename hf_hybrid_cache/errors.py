"""The base class of every exception that this package raises on its own account."""


class HybridCacheError(Exception):
    """The base of all errors of this package, each of which extends a built-in one, or one of torch's, as well."""
