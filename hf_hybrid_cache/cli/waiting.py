"""Whether threads of OpenMP sleep while they wait: they do where other processes are busy."""

import os
from collections.abc import MutableMapping

VARIABLE = "GOMP_SPINCOUNT"
# One process that computes all the time, as a measurement of a tenth of a second shows it.
_BUSY_PROCESSORS = 0.5


def let_waiting_threads_sleep(busy_processors: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """
    Let threads of OpenMP sleep while they wait, if other processes need the processors and the user chose nothing.

    By default waiting threads spin, on a processor that the slowest thread may need. Sleeping threads wake up late: a
    step of a small model takes up to twice as long. Call it before torch is imported: GNU's OpenMP, which torch's
    wheels for Linux bring, reads the variable when it is loaded.

    Args:
        busy_processors: processors that other processes use; may be not a number.
        environment: receives the variable.
    """
    if busy_processors > _BUSY_PROCESSORS and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(VARIABLE, "0")
