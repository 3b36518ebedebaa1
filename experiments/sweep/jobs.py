"""
Calls as jobs, through submitit (https://github.com/facebookincubator/submitit): here, or as an array of Slurm.

A call that is run as a job must find what it has done before, because a scheduler may end it and start it again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from submitit import Executor, Job

# `debug` runs the calls in this process, one after the other.
EXECUTORS = ("local", "slurm", "debug")
_POLL_SECONDS = {"local": 0.2, "slurm": 10.0, "debug": 0.0}
# submitit's own default ends jobs after five minutes.
_DEFAULT_MINUTES = 24 * 60


class JobsError(ValueError):
    """Jobs cannot be started as asked, or have failed; the message says why."""


class JobFailedError(RuntimeError):
    """A call raised an exception, whose line is the message, or its process ended without a word."""


def run_jobs(
    calls: Sequence[Callable[[], Any]],
    executor_name: str,
    folder: Path,
    at_once: int = 1,
    parameters: Mapping[str, int | str] | None = None,
) -> Iterator[Any]:
    """
    Run every call once, in a process of its own, or again where it was ended before its time.

    Args:
        calls: picklable.
        executor_name: one of `EXECUTORS`.
        folder: for what submitit keeps, and for what jobs print.
        at_once: how many run at the same time, at most.
        parameters: of submitit's `update_parameters`, such as `{"timeout_min": 60, "slurm_partition": "gpu"}`.

    Yields:
        What a call returned, or a `JobFailedError`, as calls end. Jobs that have not ended are cancelled when the
        iteration is given up.

    Raises:
        JobsError: submitit is not installed, does not know a parameter, or there is no Slurm here.
    """
    executor = _executor(executor_name, folder, at_once, parameters or {})
    waiting: list[_Resumable] = [_Resumable(call) for call in calls]
    running: list[Job[Any]] = []
    try:
        while waiting or running:
            if waiting and executor_name == "slurm":
                with executor.batch():  # one array, of which the scheduler runs so many at once
                    running = [executor.submit(call) for call in waiting]
                waiting = []
            while waiting and len(running) < at_once:
                running.append(executor.submit(waiting.pop(0)))
            ended = [job for job in running if job.done()]
            for job in ended:
                running.remove(job)
                yield _outcome(job)
            if not ended:
                time.sleep(_POLL_SECONDS[executor_name])
    finally:
        for job in running:
            job.cancel(check=False)


def job_parameters(given: Iterable[str]) -> dict[str, int | str]:
    """
    Parse parameters of jobs, written as `NAME=VALUE`.

    Raises:
        JobsError: one of them is not.
    """
    parameters: dict[str, int | str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise JobsError(f"--job-option {each!r} is not NAME=VALUE, such as timeout_min=60.")
        parameters[name] = int(value) if value.isdecimal() else value
    return parameters


class _Resumable:
    """A call that is put into the queue again where the scheduler takes its machine away."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call

    def __call__(self) -> Any:
        return self._call()

    def checkpoint(self) -> Any:
        """Return the submission that submitit queues again before it ends the process."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _executor(name: str, folder: Path, at_once: int, parameters: Mapping[str, int | str]) -> "Executor":
    """Return submitit's executor with these settings."""
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise JobsError(f'--executor {name} needs submitit: pip install ".[experiments]"') from error
    array = {"slurm_array_parallelism": at_once} if name == "slurm" else {}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=name)
        executor.update_parameters(**{"timeout_min": _DEFAULT_MINUTES, **array, **parameters})
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        raise JobsError(f"--executor {name}: {error}") from error
    return executor


def _outcome(job: "Job[Any]") -> Any:
    """Return what a call returned, or its failure."""
    try:
        return job.result()
    except Exception as error:  # whatever a call, or its process, can end with
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        rules = [number for number, line in enumerate(lines) if set(line) == {"-"}]
        # submitit puts the call's traceback between rules; a process that was killed has none.
        has_trace = "Traceback" in str(error) and len(rules) > 1
        failure = JobFailedError(lines[rules[1] - 1] if has_trace else "its process ended without a word")
        failure.__cause__ = error
        return failure
