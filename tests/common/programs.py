"""Programs that need a process of their own, or one in which nothing is compiled meanwhile."""

import os
import subprocess
import sys
import threading
from pathlib import Path

TESTS = Path(__file__).parents[1]


def command(program: str) -> list[str]:
    """Return the arguments that run Python code in a process of its own."""
    return [sys.executable, "-c", program]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that may import the tests."""
    return os.environ | more | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}


def run_program(program: str, **more: str) -> None:
    """Run Python code that may import the tests; fails if it does."""
    subprocess.run(command(program), check=True, env=environment(**more), timeout=300)


def wait_for_compilation() -> None:
    """Wait until no kernel is compiled in the background, which would change measured memory."""
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()
