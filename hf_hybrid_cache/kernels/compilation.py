"""Compiling kernels before their first use: beside the prefill, or as fast as it goes."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from .attention import compile_attention
from .coded_attention import attend_coded, compile_coded_attention
from .coding import compile_coding
from .key_index import compile_index
from .selected_attention import compile_selected_attention
from .selected_coded_attention import compile_selected_codes

# From Numba's cache on disk it takes less.
_SECONDS_TO_LOAD = 2.0

_threads: dict[tuple[np.dtype, bool, bool], threading.Thread] = {}


def compile_in_background(element: np.dtype, is_coded: bool = False, is_selected: bool = False) -> None:
    """
    Start compiling attention over blocks of `element`, over coded ones beside them and over chosen pages, once in a
    process.

    From Numba's cache on disk it takes a quarter of a second, without it some seconds. A call that comes before the end
    waits, and so does a fork of the process.
    """
    key = element, is_coded, is_selected
    if key in _threads:
        return
    _let_forks_wait()
    thread = threading.Thread(target=_compile, args=key, name=f"compile {element} attention", daemon=True)
    if _threads.setdefault(key, thread) is thread:
        # Where there are no more threads to be had, the first call compiles.
        with contextlib.suppress(RuntimeError):
            thread.start()


def _compile(element: np.dtype, is_coded: bool, is_selected: bool = False) -> None:
    if is_coded:
        compile_coding(element)
    compile_attention(element)
    if is_coded:
        compile_coded_attention(element)
    if is_selected:
        compile_index(element)
        (compile_selected_codes if is_coded else compile_selected_attention)(element)


def compile_and_wait(element: np.dtype, is_coded: bool, on_wait: Callable[[], None]) -> None:
    """
    Compile the same now, on two cores if nothing is on disk yet: Numba compiles in one thread of a process at a time.

    Args:
        element: as in `compile_in_background`.
        is_coded: likewise.
        on_wait: called once if it takes more than reading from disk.
    """
    beside = None
    if is_coded and not _is_on_disk(attend_coded):
        program = "import numpy, sys; from hf_hybrid_cache.kernels import coded_attention as kernel; "
        program += "kernel.compile_coded_attention(numpy.dtype(sys.argv[1]))"
        with contextlib.suppress(OSError):  # then it is compiled here
            beside = subprocess.Popen([sys.executable, "-c", program, element.name], stderr=subprocess.DEVNULL)
    thread = threading.Thread(target=_compile, args=(element, is_coded and beside is None), daemon=True)
    try:
        thread.start()
        thread.join(_SECONDS_TO_LOAD)
        if thread.is_alive() or beside is not None:
            on_wait()
        thread.join()
        if beside is not None:
            compile_coding(element)
            beside.wait()
            compile_coded_attention(element)
    finally:
        if beside is not None:
            beside.kill()  # after an interrupt
            beside.wait()


def _is_on_disk(kernel: Any) -> bool:
    return any(Path(kernel.stats.cache_path).glob(f"*.{kernel.py_func.__name__}-*.nbi"))


@cache
def _let_forks_wait() -> None:
    """A process that is forked while another thread compiles would wait for that thread, which it does not have."""
    if hasattr(os, "register_at_fork"):
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
