"""
A process that does something when it is told to, and sleeps until then; both sides of the pipe.

Each line that it is told is answered with a line of JSON. A program that is told things:

    def answers() -> Iterator[Any]:
        yield "ready"
        for line in sys.stdin:
            yield seconds_of(step)

    tell(answers())

Another Python may run it: nothing here needs more than the standard library.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]


class EndedError(RuntimeError):
    """A process ended by itself; the message says how."""


class ToldProcess:
    """
    A process that is told lines.

    Args:
        command: program and arguments.
        folder: to run in.
        environment: instead of this one's.

    Attributes:
        first: the answer that it gives without being told anything, once it is ready.

    Raises:
        EndedError: it ended, now or when it was told something.
    """

    def __init__(self, command: list[str], folder: Path = HERE, environment: Mapping[str, str] | None = None):
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.first = self._answer()

    def ask(self, line: object) -> Any:
        """Tell it one line; return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "answer" in answer:
            return answer["answer"]
        self._process.communicate()
        raise EndedError(answer.get("error") or reason_of_end(self._process.returncode, ""))


def tell(answers: Iterable[Any]) -> None:
    """Give answers as they come, or an error as the last one; whatever else is printed goes elsewhere."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too
    try:
        for answer in answers:
            print(json.dumps({"answer": answer}), file=output)
    except Exception as error:  # whatever it is, another process tells of it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=output)


def failure_of(command: list[str]) -> str | None:
    """The signal that ended a process, or the last line of what it complained of; None if it ended well."""
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return reason_of_end(result.returncode, result.stderr) if result.returncode else None


def reason_of_end(status: int, complaints: str) -> str:
    """Return the signal that ended a process, or the last line of its error messages."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return (complaints.strip().splitlines() or [f"exit status {status}"])[-1]
