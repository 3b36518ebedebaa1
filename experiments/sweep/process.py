"""Run the measurement of a cell in a process of its own, and record how that process ends."""

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.sweep.cell import Cell

_KERNEL_COUNTERS = Path("/proc/vmstat")
_SHOWN_LINES = 3


def measured_apart(cell: Cell, limit_seconds: float, gpu_bytes: int | None = None) -> dict[str, Any]:
    """
    The record of a cell, measured in a new process.

    A process that is killed for want of memory, takes longer than `limit_seconds` or fails has a record too, with that
    as its status. On Ctrl-C the process ends before this does.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "experiments.sweep.measure", json.dumps(asdict(cell)), str(out)]
        if gpu_bytes is not None:
            command.append(str(gpu_bytes))
        failure = run_limited(command, limit_seconds)
        if failure is None:
            found = json.loads(out.read_text())
        else:
            found = {"result": failure, "environment": records.environment()}
    return {"cell": asdict(cell), "limit_seconds": limit_seconds, **found}


def run_limited(command: list[str], limit_seconds: float) -> dict[str, Any] | None:
    """Run a program in the root of the repository; None if it succeeds, otherwise a result that says how it ended."""
    killed_before = _kills_for_memory()
    with subprocess.Popen(
        command, cwd=records.RESULTS.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return {"status": "time limit", "message": f"not done in {limit_seconds:,.0f} s"}
        finally:
            process.kill()
    if process.returncode == 0:
        return None
    if process.returncode == -signal.SIGKILL and _kills_for_memory() > killed_before:
        return {"status": "out of memory", "where": "host", "bytes_asked": None, "message": "killed by the kernel"}
    lines = [line for line in errors.splitlines() if line.strip()]
    return {"status": "failed", "message": "\n".join(lines[-_SHOWN_LINES:]) or f"exit status {process.returncode}"}


def _kills_for_memory() -> int:
    """Return the number of processes that the kernel has killed for lack of memory; 0 where it does not tell."""
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
