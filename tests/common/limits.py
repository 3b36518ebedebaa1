"""Limits of this process that are lower for a while."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def limited(limit: str, number: int) -> Iterator[None]:
    """Set a limit of the system, such as "RLIMIT_FSIZE", to another number."""
    import resource

    which = getattr(resource, limit)
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, limits)
