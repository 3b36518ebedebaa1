"""Converting numbers of users, also NumPy's and torch's, and of files."""

import operator
from numbers import Real
from typing import Any


def as_integer(given: Any) -> int | None:
    """Return a number as a Python integer; `None` for anything else, booleans and floats too."""
    if isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def as_float(given: Any) -> float | None:
    """Return a number as a Python float; `None` for anything else, booleans too."""
    if isinstance(given, bool) or not isinstance(given, Real):
        return None
    return float(given)


def as_count(value: Any, limit: int = 2**40) -> int:
    """
    Return an integer from JSON.

    Raises:
        ValueError: it is something else, negative, or not below the limit.
    """
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is not a count")
    return value
