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


def checked_integer(name: str, given: object) -> int:
    """
    A user's number as an integer.

    Raises:
        TypeError: it is not an integer.
    """
    integer = as_integer(given)
    if integer is None:
        raise TypeError(f"{name} must be an integer, got {given!r}.")
    return integer


def checked_bool(name: str, given: object) -> bool:
    """
    A user's switch as a bool.

    Raises:
        TypeError: it is not a bool.
    """
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}.")
    return given


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
