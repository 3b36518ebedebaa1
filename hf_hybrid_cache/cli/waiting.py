"""How threads of OpenMP wait for each other: asleep, so that other processes cost a step less."""

import os
from collections.abc import MutableMapping

VARIABLE = "GOMP_SPINCOUNT"


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """
    Let threads that have done their share sleep at once, unless the user has said how they wait.

    By default they spin, on a processor that the slowest may need. GNU's OpenMP, which torch's wheels for Linux bring,
    reads this when it is loaded: call it before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(VARIABLE, "0")
