"""The `hf-hybrid-cache` command."""

import os
import sys

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f'The hf-hybrid-cache command needs {error.name}: pip install "hf_hybrid_cache[demo]"')

from ..other_processes import OtherProcesses, load_average
from .console import end_at_interrupt
from .waiting import let_waiting_threads_sleep


def main() -> None:
    """Run the command, as the installed script does."""
    end_at_interrupt()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("error: Standard output is closed, and answers go there: let it go to /dev/null.", file=sys.stderr)
        sys.exit(2)
    others = OtherProcesses()
    from .app import run  # only now: Ctrl-C can end its imports too

    let_waiting_threads_sleep(others.processors(), load_average())
    run()
