"""A thread for kernels that run on the CPU while an accelerator computes."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from ..kernels import use_threads_here

Result = TypeVar("Result")


class KernelThread:
    """
    One thread, started when it is first used, that does one thing after the other.

    A forked process, in which it is not, starts its own.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Have `work` done, with as many threads as torch has where this is called."""
        threads = torch.get_num_threads()

        def run() -> Result:
            if torch.get_num_threads() != threads:
                use_threads_here(threads)
            return work()

        if self._executor is None or self._process != os.getpid():
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_hybrid_cache-kernel")
            self._process = os.getpid()
        return self._executor.submit(run)
