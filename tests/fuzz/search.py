"""How a search over inputs goes about it."""

from hypothesis import HealthCheck, settings

from soak import budget


def search_at_random(ci: int, soak: int) -> settings:
    return settings(
        max_examples=budget(ci, soak),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
