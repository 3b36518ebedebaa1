"""Jobs: calls in processes of their own, each run to its end, once or again."""

import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_hybrid_cache.jobs import JobFailedError, Jobs, JobsError, job_parameters

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


@dataclass(frozen=True)
class Sleeping:
    folder: Path

    def __call__(self) -> None:
        unfinished = self.folder / "unfinished"
        unfinished.write_text(str(os.getpid()))
        unfinished.replace(self.folder / "process")
        time.sleep(100)


# submitit's `debug` leaves the files of what jobs print open.
@pytest.mark.filterwarnings("ignore:.*DEBUG_:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("executor", ["local", "debug"])
def test_every_call_returns_under_its_number(executor: str, tmp_path: Path):
    calls = [Noted(tmp_path, number) for number in range(3)]
    assert sorted(Jobs(executor, tmp_path / "jobs", at_once=2).run(calls)) == [(0, 0), (1, 1), (2, 2)]


def test_no_more_run_at_once_than_asked_for_and_none_in_this_process(tmp_path: Path):
    waits = []
    calls = [Noted(tmp_path, number) for number in range(3)]
    list(Jobs("local", tmp_path / "jobs", at_once=1).run(calls, lambda: waits.append(1)))
    times = sorted(tuple(map(float, (tmp_path / str(number)).read_text().split())) for number in range(3))
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))
    assert os.getpid() not in {int(process) for _, _, process in times}
    assert waits


@dataclass(frozen=True)
class Threads:
    def __call__(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which processors there are")
@pytest.mark.parametrize("given", [None, "3"])
def test_local_jobs_when_threads_are_not_set_then_share_processors(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    processors = len(os.sched_getaffinity(0))
    ((_, found),) = Jobs("local", tmp_path / "jobs", at_once=2 * processors).run([Threads()])
    assert found == (given or "1")
    assert os.environ.get("OMP_NUM_THREADS") == given


def test_an_exception_is_what_its_call_ends_with_and_the_others_run(tmp_path: Path):
    calls = [Failing("no such thing"), Noted(tmp_path, 1)]
    outcomes = dict(Jobs("local", tmp_path / "jobs").run(calls))
    assert isinstance(outcomes[0], JobFailedError)
    assert str(outcomes[0]) == "ValueError: no such thing"
    assert outcomes[1] == 1


@pytest.mark.slow
@needs_signals
def test_a_process_that_is_killed_is_an_exception(tmp_path: Path):
    ((_, outcome),) = Jobs("local", tmp_path / "jobs").run([Killed()])
    assert isinstance(outcome, JobFailedError)
    assert str(outcome) == "its process ended without a word"


@needs_signals
def test_a_job_whose_machine_is_taken_away_is_run_again(tmp_path: Path):
    assert list(Jobs("local", tmp_path / "jobs").run([Preempted(tmp_path)])) == [(0, "went on")]


@needs_signals
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_jobs_end_when_the_iteration_is_given_up(handler: Any, tmp_path: Path, request: pytest.FixtureRequest):
    before = signal.signal(signal.SIGINT, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    running = Jobs("local", tmp_path / "jobs", at_once=2).run([Noted(tmp_path, 0), Sleeping(tmp_path)])
    assert next(running) == (0, 0)
    while not (tmp_path / "process").exists():
        time.sleep(0.05)
    process = int((tmp_path / "process").read_text())
    running.close()
    assert not _is_running(process)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().split()[2]


def test_parameters_are_integers_or_text():
    assert job_parameters(["timeout_min=60", "slurm_partition=gpu"]) == {"timeout_min": 60, "slurm_partition": "gpu"}
    for wrong in ("timeout_min", "=3", "a="):
        with pytest.raises(JobsError, match="is not NAME=VALUE"):
            job_parameters([wrong])


def test_a_parameter_that_submitit_does_not_know_is_named(tmp_path: Path):
    with pytest.raises(JobsError, match="minutes"):
        next(Jobs("local", tmp_path, parameters={"minutes": 3}).run([Failing("never")]))
