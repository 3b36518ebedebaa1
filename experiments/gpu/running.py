"""Runs one step after the other until time is up; what is done is not run again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.gpu.steps import Step

_LEAST_SECONDS = 20  # in less than that nothing is measured
_SECONDS_TO_STOP = 15


class Ended(StrEnum):
    """The ways in which a step can end."""

    DONE = "done"
    OVER_LIMIT = "over its limit"
    FAILED = "failed"
    STOPPED = "stopped"


class Journal:
    """The results of the steps on this machine, written after each step."""

    def __init__(self, folder: Path):
        self.path = folder / "steps" / f"{records.machine_name()}.json"
        self._entries: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def is_done(self, step: Step) -> bool:
        entry = self._entries.get(step.name)
        return entry is not None and entry["ended"] == Ended.DONE and entry["command"] == list(step.command)

    def note(self, step: Step, ended: Ended, seconds: float) -> None:
        self._entries[step.name] = {
            "command": list(step.command),
            "ended": ended,
            "seconds": round(seconds, 1),
            "git_revision": records.git_revision(),
        }
        with records.written_whole(self.path) as file:
            file.write(json.dumps(self._entries, indent=1) + "\n")


def run_all(steps: Iterable[Step], journal: Journal, minutes: float, again: bool) -> dict[str, Ended | None]:
    """
    Run the steps.

    Args:
        steps: in this order.
        journal: of what was run before.
        minutes: after which no step goes on.
        again: also what is done.

    Returns:
        by name how each ended, `None` where there was no time to begin it.
    """
    deadline = time.monotonic() + 60 * minutes
    found: dict[str, Ended | None] = {}
    for step in steps:
        if journal.is_done(step) and not again:
            print(f"== {step.name}: done before", flush=True)
            found[step.name] = Ended.DONE
            continue
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            found[step.name] = None
            continue
        print(f"== {step.name}, with {left / 60:.1f} minutes left", flush=True)
        start = time.monotonic()
        limit = 60 * step.limit_minutes
        ended = run_step(step, min(left, limit))
        if ended == Ended.STOPPED and limit < left:
            ended = Ended.OVER_LIMIT
        found[step.name] = ended
        journal.note(step, ended, time.monotonic() - start)
        print(f"== {step.name}: {ended} after {time.monotonic() - start:.0f} s", flush=True)
    return found


def run_step(step: Step, seconds: float) -> Ended:
    """Run one step; at its limit interrupt all processes that it started, and kill them if they go on."""
    with subprocess.Popen(
        [sys.executable, *step.command], cwd=records.RESULTS.parent, start_new_session=True
    ) as process:
        try:
            return Ended.DONE if process.wait(seconds) == 0 else Ended.FAILED
        except subprocess.TimeoutExpired:
            return Ended.STOPPED
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also ends processes that it has left running
    process.wait()
