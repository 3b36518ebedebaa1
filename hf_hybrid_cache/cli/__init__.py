"""The `hf-hybrid-cache` command."""

from .interrupts import end_at_once
from .waiting import let_waiting_threads_sleep


def main() -> None:
    """Run the command, as the installed script does."""
    end_at_once()
    let_waiting_threads_sleep()
    from .app import run  # only now: what it imports can be interrupted too

    run()
