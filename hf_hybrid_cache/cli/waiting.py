"""Whether threads of OpenMP sleep while they wait: they do where other processes are busy."""

import os
from collections.abc import MutableMapping

VARIABLE = "GOMP_SPINCOUNT"
# Less than one process that computes all the time.
_BUSY_PROCESSORS = 0.5


def let_waiting_threads_sleep(
    busy_processors: float, load: float, environment: MutableMapping[str, str] = os.environ
) -> None:
    """
    Let threads of OpenMP sleep while they wait, if other processes need the processors and the user chose nothing.

    Two numbers must tell so: what is used now may be over in a second, and the last minute may be over by now.

    By default waiting threads spin, on a processor that the slowest thread may need. Sleeping threads wake up late: a
    step of a small model takes up to twice as long. Call it before torch is imported: GNU's OpenMP, which torch's
    wheels for Linux bring, reads the variable when it is loaded.

    Args:
        busy_processors: processors that other processes use now; may be not a number.
        load: processes that computed in the last minute, on average; may be not a number.
        environment: receives the variable.
    """
    are_busy = busy_processors > _BUSY_PROCESSORS and load > _BUSY_PROCESSORS
    if are_busy and not {VARIABLE, "OMP_WAIT_POLICY"} & set(environment):
        environment[VARIABLE] = "0"
