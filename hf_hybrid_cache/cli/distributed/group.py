"""The group of processes that divide the tokens of a cache."""

from datetime import timedelta

from rich.console import Console
from torch import distributed

from . import ranks

# The slowest process may load its model for so long; later, one may let the others wait while it writes a file.
_TO_BEGIN, _TO_ANSWER = timedelta(minutes=30), timedelta(minutes=10)


def joined() -> "distributed.ProcessGroup | None":
    """Wait for all processes that `torchrun` started, and return their group; `None` without `torchrun`."""
    if ranks.num_processes() == 1:
        return None
    distributed.init_process_group("gloo", timeout=_TO_BEGIN)
    distributed.barrier()
    return distributed.new_group(timeout=_TO_ANSWER, backend="gloo")


def consoles(quiet: bool = False) -> tuple[Console, Console]:
    """A console for answers and one for remarks; only the first process prints, and no remarks if `quiet`."""
    is_other = ranks.rank() > 0
    return Console(soft_wrap=True, quiet=is_other), Console(stderr=True, soft_wrap=True, quiet=is_other or quiet)
