"""Processes that share caches, started once and given functions to run together."""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed

SECONDS_TO_ANSWER = 300
# The group's timeout: the longest time that one process lets the others wait.
TIMEOUT = timedelta(seconds=60)


class Group:
    """
    Processes in a group of `torch.distributed`, with one thread each. A context manager.

    Args:
        size: how many.
        timeout: of the group.
        has_host: whether the first process keeps what all of them meet by, which is in a file otherwise.
    """

    def __init__(self, size: int, timeout: timedelta = TIMEOUT, has_host: bool = False):
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"tcp://127.0.0.1:{free_port()}" if has_host else f"file://{self._folder.name}/store"
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, meeting, timeout)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.pipes.append(ours)
        for process in self.processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let all processes call a function of a module, by its name."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def answer(self, rank: int, seconds: float = SECONDS_TO_ANSWER) -> Any:
        """Return the result of `function` in one process; an error that it raised is raised here."""
        if not self.pipes[rank].poll(seconds):
            raise TimeoutError(f"rank {rank} does not answer")
        result, error, trace = self.pipes[rank].recv()
        if error is not None:
            error.add_note(f"in rank {rank}:\n{trace}")
            raise error
        return result

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Let all processes call a function; return the result of each."""
        self.start(function, *arguments)
        return [self.answer(rank) for rank in range(len(self.pipes))]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _serve(pipe: Connection, rank: int, size: int, meeting: str, timeout: timedelta) -> None:
    os.environ.pop("HF_HYBRID_CACHE_NUM_THREADS", None)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = function(*arguments), None, ""
        except Exception as error:
            answer = None, error, traceback.format_exc()
        pipe.send(answer)
