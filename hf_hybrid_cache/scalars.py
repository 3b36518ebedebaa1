"""Converting numbers of users, also NumPy's and torch's."""

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
