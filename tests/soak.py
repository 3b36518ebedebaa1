"""How much tests that search at random do, and what they did: little in CI, much with `--soak` (`make soak`)."""

import os
from collections import Counter

from hypothesis import HealthCheck, settings

_SWITCH = "HF_HYBRID_CACHE_SOAK"
_done: Counter[str] = Counter()


def set_soaking(is_soaking: bool) -> None:
    """For this process and those that it starts."""
    os.environ[_SWITCH] = "1" if is_soaking else ""


def budget(ci: int, soak: int) -> int:
    """How many examples a test may take."""
    return soak if os.environ.get(_SWITCH) else ci


def search_at_random(ci: int, soak: int, **options: int) -> settings:
    """How a search over inputs goes about it, as one example after another or as a sequence of steps."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=budget(ci, soak), suppress_health_check=checks, **options)


def count(what: str, number: int = 1) -> None:
    """Note for the record of a soak what has been done, and held."""
    _done[what] += number


def counts() -> dict[str, int]:
    """What this process has noted."""
    return dict(_done)
