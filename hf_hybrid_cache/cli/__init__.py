"""The `hf-hybrid-cache` command."""

from ..other_processes import OtherProcesses
from .interrupts import end_at_once
from .waiting import let_waiting_threads_sleep


def main() -> None:
    """Run the command, as the installed script does."""
    end_at_once()
    others = OtherProcesses()
    from .app import run  # only now: Ctrl-C can end its imports too

    let_waiting_threads_sleep(others.processors())
    run()
