"""Numbers of users, also NumPy's and torch's, and of files; and sizes and durations as people write them."""

import operator
import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Tokens of a prompt in a forward pass: enough for the weights' products, and so few that their activations are little
# beside a cache.
PREFILL_CHUNK_SIZE = 2048
# Tokens of a decode step in one call (`fuse_decode`). More are a prompt's, for which products of many are faster.
MOST_ROWS = 16
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SHOWN = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
# A number with more digits is a slip, and may exceed the range of floats.
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(IB|B|)", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"([0-9]{1,18})([KM]?)", re.IGNORECASE | re.ASCII)


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


def parse_bytes(size: str | int) -> int:
    """
    Bytes: `8GiB`, `8g` (both 2**30), `8GB` (10**9), `512MiB`, or a plain number.

    Raises:
        ValueError: it is something else.
    """
    number = as_integer(size)
    match = _SIZE.fullmatch(str(size if number is None else number).strip())
    if match is None or (not match[2] and match[3].upper() == "IB"):
        raise ValueError(f"{size!r} is not a size in bytes: write it as 8GiB, 8GB, 512MiB or a plain number.")
    units = _DECIMAL if match[3].upper() == "B" else _BINARY
    return int(Fraction(match[1]) * units[match[2].upper()])


def parse_tokens(count: str | int) -> int:
    """
    Tokens: `131072`, `131,072`, or `128K`, where K is 1,024 as in the names of context lengths.

    Raises:
        ValueError: it is something else, or less than one.
    """
    match = _TOKENS.fullmatch(str(count).strip().replace(",", "").replace("_", ""))
    tokens = int(match[1]) * _BINARY[match[2].upper()] if match else 0
    if tokens == 0:
        raise ValueError(f"{count!r} is not a number of tokens: write it as 131072 or 128K.")
    return tokens


def bytes_text(num_bytes: float) -> str:
    """Write a size in bytes, KiB, MiB or GiB, whichever has few digits."""
    for unit, size in _SHOWN:
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def duration_text(seconds: float) -> str:
    """Write a duration in seconds, minutes or hours, whichever has few digits."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def ranges_text(numbers: Iterable[int], separator: str = ",") -> str:
    """Return numbers as text such as `0-3,8`, in order."""
    runs = ([each for _, each in run] for _, run in groupby(enumerate(sorted(numbers)), lambda each: each[1] - each[0]))
    return separator.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def num_common_keys(one: "np.ndarray", other: "np.ndarray") -> int:
    """Return with how many equal numbers two arrays begin, `[tokens]`."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
