"""
Commands of `hf-hybrid-cache`: in this process, or where it matters what a process imports, in one of their own.

    run("generate", "--question", "Who?", *of_model).stdout     # ends with exit code 0
    error_of("generate", "--bits", 5)                           # ends with exit code 2, and prints nothing
    lines(run("store", folder, "--json"))                       # of JSON
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from click.testing import Result
from typer.testing import CliRunner

from hf_hybrid_cache.cli.app import app

HEAVY = {"torch", "transformers", "numba"}
MARK = "\0ended\n"
SHORT = ("--device", "cpu", "--dtype", "float32")


def run(*arguments: object, code: int = 0, typed: str | bytes | None = None) -> Result:
    """Run a command, which ends with this exit code and without a traceback."""
    result = CliRunner().invoke(app, list(map(str, arguments)), input=typed)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


def error_of(*arguments: object) -> str:
    """Return the message of a command that a user's mistake ends before anything is printed."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    return result.stderr


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


def without_heavy(*commands: Sequence[object]) -> list[Ended]:
    """Run commands in a process of its own, which imports nothing heavy."""
    program = f"""
import json, sys
from hf_hybrid_cache.cli import main
for command in json.loads(sys.argv.pop()):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as ended:
        for stream in sys.stdout, sys.stderr:
            print(ended.code or 0, end={MARK!r}, file=stream)
assert not {HEAVY} & set(sys.modules)
"""
    given = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", program, given], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    pairs = zip(done.stdout.split(MARK)[:-1], done.stderr.split(MARK)[:-1], strict=True)
    return [Ended(int(out[-1]), out[:-1], said[:-1]) for out, said in pairs]
