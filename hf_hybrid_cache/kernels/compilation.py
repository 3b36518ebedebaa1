"""Compiling a kernel before its first use, beside the prefill."""

import contextlib
import os
import threading
from functools import cache

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from .attention import compile_attention
from .coded_attention import compile_coded_attention
from .coding import compile_coding

_threads: dict[tuple[np.dtype, bool], threading.Thread] = {}


def compile_in_background(element: np.dtype, is_coded: bool = False) -> None:
    """
    Start compiling attention over blocks of `element`, and over coded ones beside them, once in a process.

    From Numba's cache on disk it takes a quarter of a second, without it some seconds. A call that comes before the end
    waits, and so does a fork of the process.
    """
    key = element, is_coded
    if key in _threads:
        return
    _let_forks_wait()
    thread = threading.Thread(target=_compile, args=key, name=f"compile {element} attention", daemon=True)
    if _threads.setdefault(key, thread) is thread:
        # Where there are no more threads to be had, the first call compiles.
        with contextlib.suppress(RuntimeError):
            thread.start()


def _compile(element: np.dtype, is_coded: bool) -> None:
    if is_coded:
        compile_coding(element)
        compile_coded_attention(element)
    compile_attention(element)


@cache
def _let_forks_wait() -> None:
    """A process that is forked while another thread compiles would wait for that thread, which it does not have."""
    if hasattr(os, "register_at_fork"):
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
