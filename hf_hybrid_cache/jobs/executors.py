"""
Jobs, through submitit (https://github.com/facebookincubator/submitit): processes here, or an array on a Slurm cluster.

A call that is run as a job must find what it has done before, because a scheduler may end it and start it again.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HybridCacheError

if TYPE_CHECKING:
    from submitit import Executor, Job

# `debug` runs the calls in this process, one after the other.
EXECUTORS = ("local", "slurm", "debug")
INSTALL = 'pip install "hf_hybrid_cache[jobs]"'
_POLL_SECONDS = {"local": 0.2, "slurm": 10.0, "debug": 0.0}
_STDERR = 2
_THREADS = "OMP_NUM_THREADS"
# Time for processes here to end after they were told to.
_ENDING_SECONDS = 10.0
# submitit's own default ends jobs after five minutes.
_DEFAULT_MINUTES = 24 * 60


class JobsError(HybridCacheError, ValueError):
    """Jobs cannot be started as asked; the message says why, and the way out."""


class JobFailedError(HybridCacheError, RuntimeError):
    """A call raised an exception, whose line is the message, or its process ended without a word."""


@dataclass(frozen=True)
class Jobs:
    """
    Settings for calls in processes of their own.

    Args:
        executor: one of `EXECUTORS`.
        folder: for what submitit keeps, and for what jobs print.
        at_once: how many run at the same time, at most. Several on this machine share its processors, unless the
            environment says how many threads they have.
        parameters: of submitit's `update_parameters`, such as `{"timeout_min": 60, "slurm_partition": "gpu"}`.
    """

    executor: str
    folder: Path
    at_once: int = 1
    parameters: Mapping[str, int | str] = field(default_factory=dict)

    def run(
        self, calls: Sequence[Callable[[], Any]], while_waiting: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Any]]:
        """
        Run every call once, or again where it was ended before its time.

        Args:
            calls: picklable.
            while_waiting: called again and again until all have ended.

        Yields:
            The number of a call and what it returned, or a `JobFailedError`, as calls end. Jobs that have not
            ended are cancelled when the iteration is given up.

        Raises:
            JobsError: submitit is not installed, does not know a parameter, or there is no Slurm here.
        """
        executor = self._executor()
        waiting = list(enumerate(map(_Resumable, calls)))
        running: dict[int, Job[Any]] = {}
        try:
            while waiting or running:
                if waiting and self.executor == "slurm":
                    with executor.batch():  # one array, of which the scheduler runs so many at once
                        running = {number: executor.submit(call) for number, call in waiting}
                    waiting = []
                while waiting and len(running) < self.at_once:
                    number, call = waiting.pop(0)
                    with self._local_process():
                        running[number] = executor.submit(call)
                ended = [number for number, job in running.items() if job.done()]
                for number in ended:
                    yield number, _outcome(running.pop(number))
                while_waiting()
                if not ended:
                    time.sleep(_POLL_SECONDS[self.executor])
        finally:
            for job in running.values():
                job.cancel(check=False)
            given_up = time.monotonic() + _ENDING_SECONDS
            while self.executor == "local" and time.monotonic() < given_up:
                if all(job.done() for job in running.values()):
                    break
                time.sleep(_POLL_SECONDS[self.executor])

    @contextlib.contextmanager
    def _local_process(self) -> Iterator[None]:
        """Set the environment of a process that starts here: its threads, and a file for submitit's messages."""
        if self.executor != "local":
            yield
            return
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = str(max(1, processors // self.at_once))
        missing = {_THREADS: share} if self.at_once > 1 and _THREADS not in os.environ else {}
        self.folder.mkdir(parents=True, exist_ok=True)
        stderr = os.dup(_STDERR)
        # A shell lets its background processes ignore the signal that ends jobs, and their children inherit that.
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        can_be_set = threading.current_thread() is threading.main_thread()
        try:
            if is_ignored and can_be_set:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(missing)
            with (self.folder / "submitit.log").open("ab") as log:
                os.dup2(log.fileno(), _STDERR)  # it has no other way to say where to
            yield
        finally:
            if is_ignored and can_be_set:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            for name in missing:
                del os.environ[name]

    def _executor(self) -> "Executor":
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise JobsError(f"--executor {self.executor} needs submitit: {INSTALL}") from error
        array = {"slurm_array_parallelism": self.at_once} if self.executor == "slurm" else {}
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=self.executor)
            executor.update_parameters(**{"timeout_min": _DEFAULT_MINUTES, **array, **self.parameters})
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise JobsError(f"--executor {self.executor}: {error}") from error
        return executor


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


def _outcome(job: "Job[Any]") -> Any:
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
