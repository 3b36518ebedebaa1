"""The `hf-hybrid-cache` command."""

from .interrupts import end_at_once


def main() -> None:
    """Run the command, as the installed script does."""
    end_at_once()
    from .app import run  # only now: what it imports can be interrupted too

    run()
