"""Programs that need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_program(program: str, **environment: str) -> None:
    """Run Python code that may import the tests; fails if it does."""
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = os.environ | environment | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
