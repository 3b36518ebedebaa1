"""
Processes that share caches, started once and given functions to run together.

    with Group(2) as group:
        assert group.call(function, 1) == [2, 2]  # both call `function(1)` of a module
        group.start(function, 1)                  # or each answer is waited for by itself
        assert group.answer(rank=0) == 2

An error of a function is raised where its answer is waited for, with the trace of the process.
"""

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import pytest
import torch
from torch import distributed

# Machines do other things besides: nothing is slow before this.
SECONDS_TO_ANSWER = 600
NEEDS_GROUPS = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo, which this torch was built without",
)


class Group:
    """So many processes in a group of `torch.distributed`, with one thread each. A context manager."""

    def __init__(self, size: int):
        context, meeting = get_context("spawn"), f"tcp://127.0.0.1:{free_port()}"
        self.pipes, self.processes, self.is_in_step = [], [], True
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(theirs, rank, size, meeting), daemon=True))
            self.pipes.append(ours)
        for process in self.processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let all processes call a function of a module, by its name."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def answer(self, rank: int) -> Any:
        """Return the result of `function` in one process; an error that it raised is raised here."""
        if not self.pipes[rank].poll(SECONDS_TO_ANSWER):
            raise TimeoutError(f"rank {rank} does not answer")
        result, error, trace = self.pipes[rank].recv()
        if error is not None:
            error.add_note(f"in rank {rank}:\n{trace}")
            raise error
        return result

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Let all processes call a function; return the result of each, or raise the first error that comes."""
        self.is_in_step = False
        self.start(function, *arguments)
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting, SECONDS_TO_ANSWER) or waiting:
                rank = self.pipes.index(pipe)
                answers[rank] = self.answer(rank)
        self.is_in_step = True
        return [answers[rank] for rank in range(len(self.pipes))]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _serve(pipe: Connection, rank: int, size: int, meeting: str) -> None:
    os.environ.pop("HF_HYBRID_CACHE_NUM_THREADS", None)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}  # as torchrun does
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS_TO_ANSWER)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = function(*arguments), None, ""
        except Exception as error:
            answer = None, error, traceback.format_exc()
        pipe.send(answer)
