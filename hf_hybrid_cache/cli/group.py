"""The group of processes that share the cache of a command."""

from datetime import timedelta

from rich.console import Console
from torch import distributed

from . import ranks

# For the slowest to load the model; and later, for one to keep the others waiting, as it does while a file is written.
_TO_BEGIN, _TO_ANSWER = timedelta(minutes=30), timedelta(minutes=10)


def joined() -> "distributed.ProcessGroup | None":
    """The group of all processes that `torchrun` has started, once all are here; `None` without it."""
    if ranks.num_processes() == 1:
        return None
    distributed.init_process_group("gloo", timeout=_TO_BEGIN)
    distributed.barrier()
    return distributed.new_group(timeout=_TO_ANSWER, backend="gloo")


def consoles(quiet: bool = False) -> tuple[Console, Console]:
    """For answers and for remarks, if any are wanted: only the first process writes."""
    is_other = ranks.rank() > 0
    return Console(soft_wrap=True, quiet=is_other), Console(stderr=True, soft_wrap=True, quiet=is_other or quiet)
