"""The effort of tests that search at random, little by default and much in a soak, and what was done in one."""

import os
from collections import Counter

from hypothesis import HealthCheck, settings

_IS_SOAKING = "HF_HYBRID_CACHE_TEST_SOAK"
_TIMES_AS_MUCH = 50
_done: Counter[str] = Counter()


def begin() -> None:
    """Let searches of this process and its children be long."""
    os.environ[_IS_SOAKING] = "1"


def budget(number: int) -> int:
    """Return how many examples a test may take: this number, and fifty times as many in a soak."""
    return number * (_TIMES_AS_MUCH if _IS_SOAKING in os.environ else 1)


def search_at_random(examples: int, **options: int) -> settings:
    """Return Hypothesis' settings for a search over inputs or sequences of steps."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=budget(examples), suppress_health_check=checks, deadline=None, **options)


def count(what: str, number: int = 1) -> None:
    """Count, for the record of a soak, a property that was tested and held."""
    _done[what] += number


def take_counts() -> dict[str, int]:
    """Return what this process has counted since the last call."""
    taken = dict(_done)
    _done.clear()
    return taken
