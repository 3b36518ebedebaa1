"""Sizes as people write them: `8GiB`, `128K` tokens."""

import re
from fractions import Fraction

from ..scalars import as_integer

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# A number with more digits is a slip, and may exceed the range of floats.
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(IB|B|)", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"([0-9]{1,18})([KM]?)", re.IGNORECASE | re.ASCII)


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
