"""How much tests that search at random do, and what they did: little in CI, much with `--soak` (`make soak`)."""

import os
from collections import Counter

_SWITCH = "HF_HYBRID_CACHE_SOAK"
_done: Counter[str] = Counter()


def set_soaking(is_soaking: bool) -> None:
    """For this process and those that it starts."""
    os.environ[_SWITCH] = "1" if is_soaking else ""


def budget(ci: int, soak: int) -> int:
    """How many examples a test may take."""
    return soak if os.environ.get(_SWITCH) else ci


def count(what: str, number: int = 1) -> None:
    """Note for the record of a soak what has been done, and held."""
    _done[what] += number


def counts() -> dict[str, int]:
    """What this process has noted."""
    return dict(_done)
