"""Experiments for a GPU can be rehearsed, end with their time, go on where they were stopped, and fill tables."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.common import records
from experiments.gpu import __main__ as gpu
from experiments.gpu.decode import begun
from experiments.gpu.page import found_in


def test_steps_run_in_their_order_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "_LEAST_SECONDS", 0)
    monkeypatch.setattr(gpu, "_SECONDS_TO_STOP", 0.1)
    steps = {"good": ["-c", "pass"], "bad": ["-c", "raise SystemExit(3)"]}
    assert gpu.run_all(steps, minutes=5) == {"good": gpu.DONE, "bad": gpu.FAILED}
    slow = {"slow": ["-c", "import time; time.sleep(600)"], "later": ["-c", "raise AssertionError"]}
    assert gpu.run_all(slow, minutes=0.01) == {"slow": gpu.STOPPED, "later": gpu.NOT_BEGUN}


def test_a_step_is_stopped_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "_SECONDS_TO_STOP", 0.1)
    started = tmp_path / "child"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    seconds = 0.5
    while not (started.exists() and started.read_text()):  # longer, where the machine is busy
        ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
        assert gpu.run_step(["-c", ignoring], seconds) == gpu.STOPPED
        seconds *= 2
    # Nobody waits for the child, so what is left of it may be a zombie.
    process = Path(f"/proc/{started.read_text()}/stat")
    deadline = time.monotonic() + 30
    while process.exists() and process.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_every_step_is_a_program_that_knows_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for step in gpu.all_steps(tmp_path, ["--rehearse", "--force"], False, [tmp_path]).values():
        monkeypatch.setattr(sys, "argv", [step[1], "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(step[1]).main()
        told = capsys.readouterr().out
        assert all(option in told for option in step if option.startswith("--"))


@pytest.mark.slow
def test_a_rehearsal_runs_to_the_end_and_measures_nothing_twice(tmp_path: Path):
    command = [sys.executable, "-m", "experiments.gpu", "--rehearse", "--minutes", "9", "--out", str(tmp_path)]

    def rehearse() -> list[dict[str, Any]]:
        options: dict[str, Any] = {"cwd": records.RESULTS.parent, "text": True, "timeout": 600, "check": False}
        ended = subprocess.run([*command, "--only", "decode-300", "suites"], capture_output=True, **options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1]) == {"decode-300": "done", "suites": "done"}
        return found_in(tmp_path / "gpu", records.machine_name())

    first = rehearse()
    assert all(record["rehearsal"] for record in first)
    decode, suites = first
    assert {"offloaded", "both-4", "half-cpu-attention"} < decode["median_seconds"].keys()
    assert [run["tests"].split()[0] for run in suites["runs"]] == ["tests/memory/test_cuda.py", "tests/accelerator"]
    again = rehearse()
    assert again[0]["samples_seconds"].items() >= decode["samples_seconds"].items()
    assert again[1]["runs"] == suites["runs"]


def test_a_record_is_gone_on_with_if_it_is_of_the_same_measurement(tmp_path: Path):
    path, asked = tmp_path / "record.json", {"context_tokens": 300}
    assert begun(path, asked) is asked
    changes: list[dict[str, Any]] = [{}, {"context_tokens": 400}, {"environment": {"git_revision": "another"}}]
    for change in changes:
        record = {
            **asked,
            "median_seconds": {"stock": 0.1},
            "environment": {"git_revision": records.git_revision()},
            **change,
        }
        path.write_text(json.dumps(record))
        assert begun(path, asked) == (asked if change else record)
