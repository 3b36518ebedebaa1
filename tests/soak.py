"""
How much tests that search at random do, and what they did.

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
    """Of this process and those that it starts: "brief", "thorough" or "soak"."""
    os.environ[_EFFORT] = effort


def budget(thorough: int, soak: int) -> int:
    """How many examples a test may take."""
    effort = os.environ.get(_EFFORT, "brief")
    return {"brief": math.ceil(thorough * _BRIEF_SHARE), "thorough": thorough, "soak": soak}[effort]


def search_at_random(thorough: int, soak: int, **options: int) -> settings:
    """How a search over inputs goes about it, as one example after another or as a sequence of steps."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=budget(thorough, soak), suppress_health_check=checks, **options)


def count(what: str, number: int = 1) -> None:
    """Note for the record of a soak what has been done, and held."""
    _done[what] += number


def counts() -> dict[str, int]:
    """What this process has noted."""
    return dict(_done)
