"""Numbers that users give, NumPy's and torch's among them."""

import operator
from numbers import Real
from typing import Any


def as_integer(given: Any) -> int | None:
    """The integer that `given` is, as one of Python's; `None` for anything else, truth values and floats too."""
    if isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def as_float(given: Any) -> float | None:
    """The number that `given` is, as one of Python's; `None` for anything else, truth values too."""
    if isinstance(given, bool) or not isinstance(given, Real):
        return None
    return float(given)
