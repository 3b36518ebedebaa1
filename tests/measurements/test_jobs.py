"""Jobs: calls in processes of their own, each run to its end, once or again."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.sweep.jobs import JobFailedError, JobsError, run_jobs

pytest.importorskip("submitit", reason="needs submitit")
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="ends processes by signals")


@pytest.fixture(autouse=True)
def jobs_find_this_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@dataclass(frozen=True)
class Noted:
    """A call that records when it began and ended, and returns its number."""

    folder: Path
    number: int

    def __call__(self) -> int:
        begun = time.monotonic()
        time.sleep(0.1)
        (self.folder / str(self.number)).write_text(f"{begun} {time.monotonic()} {os.getpid()}")
        return self.number


@dataclass(frozen=True)
class Failing:
    message: str

    def __call__(self) -> None:
        raise ValueError(self.message)


@dataclass(frozen=True)
class Preempted:
    """A call that a scheduler ends the first time, and that completes when it is run again."""

    folder: Path

    def __call__(self) -> str:
        marker = self.folder / "begun"
        if marker.exists():
            return "went on"
        marker.touch()
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(60)
        return "was not ended"


@dataclass(frozen=True)
class Killed:
    def __call__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_calls_all_return_and_no_more_run_at_once_than_asked(at_once: int, tmp_path: Path):
    calls = [Noted(tmp_path, number) for number in range(3)]
    assert sorted(run_jobs(calls, "local", tmp_path / "jobs", at_once)) == [0, 1, 2]
    times = sorted(tuple(map(float, (tmp_path / str(number)).read_text().split())) for number in range(3))
    assert all(times[number][1] <= times[number + at_once][0] for number in range(3 - at_once))
    assert os.getpid() not in {int(process) for _, _, process in times}


@needs_signals
def test_calls_that_fail_are_told_and_the_others_run(tmp_path: Path):
    calls = [Failing("no such thing"), Killed(), Preempted(tmp_path)]
    failed, killed, preempted = run_jobs(calls, "local", tmp_path / "jobs")
    assert isinstance(failed, JobFailedError)
    assert str(failed) == "ValueError: no such thing"
    assert str(killed) == "its process ended without a word"
    assert preempted == "went on"  # it was ended, and run again


def test_parameter_that_submitit_does_not_know_is_named(tmp_path: Path):
    with pytest.raises(JobsError, match="minutes"):
        next(run_jobs([Failing("never")], "local", tmp_path, parameters={"minutes": 3}))
