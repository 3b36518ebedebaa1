"""
The effort of tests that search at random, and a record of what they did.

Little in `make test`, more with `--thorough` (`make test-all`), and much with `--soak` (`make soak`).
"""

import math
import os
from collections import Counter

from hypothesis import HealthCheck, settings

_EFFORT = "HF_HYBRID_CACHE_TEST_EFFORT"
_BRIEF_SHARE = 1 / 5
_done: Counter[str] = Counter()


def set_effort(effort: str) -> None:
    """Set the effort of this process and its children: "brief", "thorough" or "soak"."""
    os.environ[_EFFORT] = effort


def budget(thorough: int, soak: int) -> int:
    """Return the number of examples that a test may take."""
    effort = os.environ.get(_EFFORT, "brief")
    return {"brief": math.ceil(thorough * _BRIEF_SHARE), "thorough": thorough, "soak": soak}[effort]


def search_at_random(thorough: int, soak: int, **options: int) -> settings:
    """Return Hypothesis' settings for a search over inputs or sequences of steps."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=budget(thorough, soak), suppress_health_check=checks, **options)


def count(what: str, number: int = 1) -> None:
    """Count, for the record of a soak, a property that was tested and held."""
    _done[what] += number


def take_counts() -> dict[str, int]:
    """Return what this process has counted since the last call."""
    taken = dict(_done)
    _done.clear()
    return taken
