"""Whether attention over coded blocks takes the processor's integer dot products."""

from functools import cache

from .coded_tiles import has_dot_product
from .compiled import jit

_wanted: bool | None = None


@jit
def _processor_has_dot_product() -> bool:
    return has_dot_product()  # type: ignore[call-arg]


@cache
def _is_available() -> bool:
    return bool(_processor_has_dot_product())


def set_integer_kernels(enabled: bool | None) -> None:
    """
    Say whether attention over coded blocks takes integer dot products, in the whole process.

    With them the query and the weights are rounded to 16 bits, relative to the largest of their row.

    Args:
        enabled: `None`, the default, takes them where the processor has them (AVX-512 VNNI or AVX-VNNI); `False` takes
            the portable way, which is slower and rounds to 24 bits.

    Raises:
        ValueError: `True` on a processor without them.
    """
    global _wanted
    if enabled and not _is_available():
        raise ValueError("This processor has no integer dot products (AVX-512 VNNI, AVX-VNNI). Use None or False.")
    _wanted = enabled


def uses_integer_kernels() -> bool:
    """Whether attention over coded blocks takes integer dot products."""
    return _is_available() if _wanted is None else _wanted
