"""Programs that need a process of their own, or one in which nothing is compiled meanwhile."""

import os
import subprocess
import sys
import threading
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_program(program: str, **environment: str) -> None:
    """Run Python code that may import the tests; fails if it does."""
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = os.environ | environment | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)


def wait_for_compilation() -> None:
    """Wait until no kernel is compiled in the background, which would change measured memory."""
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()
