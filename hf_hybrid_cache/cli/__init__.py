"""The `hf-hybrid-cache` command."""

import contextlib
import math
import os
import sys
import time

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f'The hf-hybrid-cache command needs {error.name}: pip install "hf_hybrid_cache[demo]"')

import psutil

from .console import end_at_interrupt

# Less than one process that computes all the time.
_BUSY_PROCESSORS = 0.5


def main() -> None:
    """Run the command, as the installed script does."""
    end_at_interrupt()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("error: Standard output is closed, and answers go there: let it go to /dev/null.", file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("TQDM_LEAVE", "")  # bars vanish, also those of other libraries
    seconds, used = time.perf_counter(), _used_by_others()
    from .app import run  # only now: Ctrl-C can end its imports too

    with contextlib.suppress(OSError):  # a container may hide the load
        let_waiting_threads_sleep((_used_by_others() - used) / (time.perf_counter() - seconds), psutil.getloadavg()[0])
    run()


def let_waiting_threads_sleep(busy_processors: float, load: float) -> None:
    """
    Let threads of OpenMP sleep while they wait where other processes need the processors; before torch is imported.

    Two numbers tell so: what is used now may be over in a second, and the last minute may be over by now. Elsewhere
    threads spin, as sleeping ones wake up late, unless the user chose.
    """
    are_busy = busy_processors > _BUSY_PROCESSORS and load > _BUSY_PROCESSORS  # false where the system does not tell
    if are_busy and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "0"


def _used_by_others() -> float:
    """Return the seconds that others used processors since the machine was started; NaN where it does not tell."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return math.nan
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - time.process_time()
