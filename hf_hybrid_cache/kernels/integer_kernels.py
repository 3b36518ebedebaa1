"""Whether attention over coded blocks, and many tokens with weights of few bits, take integer dot products."""

from functools import cache

from .compiled import jit
from .pair_dots import has_pair_dot

_wanted: bool | None = None


@jit
def _processor_has_pair_dot() -> bool:
    return has_pair_dot()  # type: ignore[call-arg]


@cache
def _is_available() -> bool:
    return bool(_processor_has_pair_dot())


def set_integer_kernels(enabled: bool | None) -> None:
    """
    Say whether attention over coded blocks, and a prompt with weights of few bits, take integer dot products, in the
    whole process.

    With them the query and the weights are rounded, relative to the largest of their row and block: to 16 bits for
    codes of 8 bits, to 8 bits for others. The tokens of a prompt are rounded to 8 bits between the least and the
    largest of 32 channels, where the processor has the products for it (x86-64 with AVX512-VNNI).

    Args:
        enabled: `None`, the default, takes them where the processor has them (x86-64 with AVX2); `False` takes
            the portable way, which is slower and rounds to 24 bits.

    Raises:
        ValueError: `True` on a processor without them.
    """
    global _wanted
    if enabled and not _is_available():
        raise ValueError("This processor has no integer dot products: it has no AVX2. Use None or False.")
    _wanted = enabled


def uses_integer_kernels() -> bool:
    """Whether they are to be taken."""
    return _is_available() if _wanted is None else _wanted
