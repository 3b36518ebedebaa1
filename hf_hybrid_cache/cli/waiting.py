"""How threads of OpenMP wait for each other: asleep where other processes are busy, spinning where they are not."""

import os
from collections.abc import MutableMapping

VARIABLE = "GOMP_SPINCOUNT"
# Of one process that computes all the time, as well as it can be told in a tenth of a second.
_BUSY_PROCESSORS = 0.5


def let_waiting_threads_sleep(busy_processors: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """
    Let threads that have done their share sleep at once if others need the processors, unless the user has said how.

    By default they spin, on a processor that the slowest may need. Asleep they wake up late: a step of a small model
    takes up to twice as long then. GNU's OpenMP, which torch's wheels for Linux bring, reads this when it is loaded:
    call it before torch is imported.

    Args:
        busy_processors: that other processes keep busy; may be not a number.
        environment: written to.
    """
    if busy_processors > _BUSY_PROCESSORS and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(VARIABLE, "0")
