"""Compilation of kernels before their first use: in the background, or while the caller waits."""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from .attention.attention import attention_kernels
from .attention.codes import quantized_attention_kernels
from .attention.prefill_attention import prefill_kernels
from .attention.workspace import uses_prefill_kernel
from .forms.blocks import coding_kernels
from .forms.panels import WEIGHT_BITS, panel_kernels
from .vector.compiled import Needed
from .vector.kernel_files import is_said
from .vector.threads import get_num_threads
from .weights.experts import expert_kernels
from .weights.gemm import gemm_kernels, uses_gemm
from .weights.products import product_kernels

# Loading from disk takes less.
_SECONDS_TO_LOAD = 2.0
# After this time the thread stops waiting for other processes that compile the same kernels; the first call waits then.
_SECONDS_FOR_OTHERS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.05

_threads: list[threading.Thread] = []
_is_ending = threading.Event()


@cache
def compile_in_background(element: np.dtype, is_quantized: bool = False) -> None:
    """
    Start to compile attention over blocks of `element`, once in a process.

    Loading from disk takes a quarter of a second, compilation some seconds. A call that comes before the end waits, and
    so does a fork of the process. The end of the process waits for the kernel that is being compiled.

    Args:
        element: type of the blocks.
        is_quantized: also compile attention over quantized blocks beside them.
    """
    _started(_needed(element, is_quantized))


@cache
def compile_quantized_weights_in_background(element: np.dtype, has_experts: bool) -> None:
    """Start to compile the quantization of weights of `element`, products with them, and experts with such weights."""
    needed = panel_kernels()
    if uses_gemm(min(WEIGHT_BITS), is_bfloat16=element == np.uint16):
        needed += gemm_kernels()
    needed += product_kernels()
    if has_experts:
        needed += expert_kernels()
    _started(needed)


@cache
def compile_plain_weights_in_background() -> None:
    """Start to compile products with chosen weights in full precision, and experts with such weights."""
    _started([*product_kernels(), *expert_kernels()])


def _needed(element: np.dtype, is_quantized: bool) -> list[Needed]:
    """The kernels that attention needs, in the order in which calls need them."""
    needed = coding_kernels() if is_quantized else []
    if uses_prefill_kernel(element):
        needed += prefill_kernels(element)
    needed += attention_kernels(element)
    if is_quantized:
        needed += quantized_attention_kernels()
    return needed


def _compile(needed: Iterable[Needed]) -> None:
    """Compile kernels, one after the other; put off those that another process is compiling."""
    left = deque(needed)
    latest = time.monotonic() + _SECONDS_FOR_OTHERS
    with contextlib.suppress(Exception):  # the first call meets it too
        while left and not _is_ending.is_set() and time.monotonic() < latest:
            kernel, types = left.popleft()
            if kernel.files.are_being_written():
                left.append((kernel, types))
                _is_ending.wait(_SECONDS_BETWEEN_LOOKS)
            else:
                kernel.compile(types)
                latest = time.monotonic() + _SECONDS_FOR_OTHERS


def _started(needed: Iterable[Needed]) -> threading.Thread | None:
    """Start a thread that compiles kernels; `None` if the system gives no more threads."""
    _let_forks_and_the_end_wait()
    thread = threading.Thread(target=_compile, args=(needed,), name="compile kernels", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    _threads.append(thread)
    return thread


@cache
def _let_forks_and_the_end_wait() -> None:
    """
    Let a fork, and the end of the process, wait for the kernel that is being compiled.

    A child forked while a thread holds the compiler's lock would wait for ever. LLVM would abort if the process ended
    while a thread is in it.
    """
    if hasattr(os, "register_at_fork"):
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    atexit.register(_end)


def _end() -> None:
    _is_ending.set()
    for thread in _threads:
        thread.join()


def compile_and_wait(element: np.dtype, is_quantized: bool, on_wait: Callable[[], None]) -> None:
    """
    Compile attention over blocks of `element` and wait for it.

    In one process Numba compiles one kernel at a time. So as many processes as there are threads share the kernels of
    which no file is on disk yet.

    Args:
        element: type of the blocks.
        is_quantized: also compile attention over quantized blocks beside them.
        on_wait: called once if it takes longer than loading from disk.

    Raises:
        KernelsDisabledError: `NUMBA_DISABLE_JIT` forbids Numba to compile.
    """
    is_said.set()  # `on_wait` says it
    needed = _needed(element, is_quantized)[::-1]  # those that take longest first
    missing = sum(not kernel.files.exist() for kernel, _ in needed)
    program = f"import numpy, sys; from {__name__} import share; share(numpy.dtype(sys.argv[1]), sys.argv[2] == 'True')"
    command = [sys.executable, "-c", program, element.name, str(is_quantized)]
    others: list[subprocess.Popen] = []
    try:
        with contextlib.suppress(OSError):  # this process then compiles them
            while len(others) < min(missing, get_num_threads()) - 1:
                others.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        thread = _started(needed)
        if thread is not None:
            thread.join(_SECONDS_TO_LOAD)
            if thread.is_alive():
                on_wait()
            thread.join()
        for kernel, types in needed:
            kernel.compile(types)
    finally:
        for other in others:
            other.kill()  # has nothing left to compile, but after an interrupt
            other.wait()


def share(element: np.dtype, is_quantized: bool) -> None:
    """Compile, in this process, those kernels of `compile_and_wait` that no other process has begun to compile."""
    _compile(_needed(element, is_quantized)[::-1])
