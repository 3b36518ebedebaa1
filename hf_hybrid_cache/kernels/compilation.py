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
from .attention.prefill_attention import prefill_kernels
from .attention.quantized_attention import quantized_attention_kernels
from .prefill import uses_prefill_kernel
from .quantized.quantization import coding_kernels
from .selection.key_index import index_kernels
from .selection.selected_attention import selected_attention_kernels
from .selection.selected_quantized_attention import selected_quantized_kernels
from .vector.compiled import Needed, is_said
from .vector.threads import get_num_threads
from .weights.gemm import uses_gemm
from .weights.panel_gemm import gemm_kernels
from .weights.panel_products import panel_product_kernels
from .weights.panels import panel_kernels
from .weights.plain_products import plain_product_kernels

# Loading from disk takes less.
_SECONDS_TO_LOAD = 2.0
# After this time the thread stops waiting for other processes that compile the same kernels; the first call waits then.
_SECONDS_FOR_OTHERS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.05

_compilations: list["_Compilation"] = []
_is_ending = threading.Event()


@cache
def compile_in_background(element: np.dtype, is_quantized: bool = False, is_selected: bool = False) -> None:
    """
    Start to compile attention over blocks of `element`, once in a process.

    Loading from disk takes a quarter of a second, compilation some seconds. A call that comes before the end waits, and
    so does a fork of the process. The end of the process waits for the kernel that is being compiled.

    Args:
        element: type of the blocks.
        is_quantized: also compile attention over quantized blocks beside them.
        is_selected: also compile attention over chosen pages.
    """
    _started(_needed(element, is_quantized, is_selected))


@cache
def compile_quantized_weights_in_background(element: np.dtype, has_experts: bool) -> None:
    """Start to compile the quantization of weights of `element`, products with them, and experts with such weights."""
    needed = panel_kernels(element)
    if uses_gemm(is_bfloat16=element == np.uint16):
        needed += gemm_kernels()
    _started([*needed, *panel_product_kernels()[: 1 + has_experts]])


@cache
def compile_plain_weights_in_background() -> None:
    """Start to compile products with chosen weights in full precision, and experts with such weights."""
    _started(plain_product_kernels())


def _needed(element: np.dtype, is_quantized: bool, is_selected: bool = False) -> list[Needed]:
    """The kernels that attention needs, in the order in which calls need them."""
    needed = coding_kernels(element) if is_quantized else []
    if uses_prefill_kernel(element):
        needed += prefill_kernels(element)
    needed += attention_kernels(element)
    if is_quantized:
        needed += quantized_attention_kernels(element)
    if is_selected:
        needed += index_kernels(element)
        needed += (selected_quantized_kernels if is_quantized else selected_attention_kernels)(element)
    return needed


class _Compilation(threading.Thread):
    """
    A thread that compiles kernels, one after the other.

    It stops if the process ends, and at an error, which the first call meets too.

    Args:
        needed: kernels and their types. A kernel that another process is compiling is put off.
    """

    def __init__(self, needed: Iterable[Needed]):
        super().__init__(name="compile kernels", daemon=True)
        self._needed = deque(needed)

    def run(self) -> None:
        latest = time.monotonic() + _SECONDS_FOR_OTHERS
        with contextlib.suppress(Exception):
            while self._needed and not _is_ending.is_set() and time.monotonic() < latest:
                kernel, types = self._needed.popleft()
                if kernel.files.are_being_written():
                    self._needed.append((kernel, types))
                    _is_ending.wait(_SECONDS_BETWEEN_LOOKS)
                else:
                    kernel.compile(types)
                    latest = time.monotonic() + _SECONDS_FOR_OTHERS


def _started(needed: Iterable[Needed]) -> _Compilation | None:
    """Start a compilation; `None` if the system gives no more threads."""
    _let_forks_wait()
    _let_the_end_wait()
    compilation = _Compilation(needed)
    try:
        compilation.start()
    except RuntimeError:
        return None
    _compilations.append(compilation)
    return compilation


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
    others: list[subprocess.Popen] = []
    try:
        with contextlib.suppress(OSError):  # this process then compiles them
            while len(others) < min(missing, get_num_threads()) - 1:
                command = [sys.executable, "-c", program, element.name, str(is_quantized)]
                others.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        compilation = _started(needed)
        if compilation is not None:
            compilation.join(_SECONDS_TO_LOAD)
            if compilation.is_alive():
                on_wait()
            compilation.join()
        for kernel, types in needed:
            kernel.compile(types)
    finally:
        for other in others:
            other.kill()  # has nothing left to compile, but after an interrupt
            other.wait()


def share(element: np.dtype, is_quantized: bool) -> None:
    """Compile, in this process, those kernels of `compile_and_wait` that no other process has begun to compile."""
    _Compilation(_needed(element, is_quantized)[::-1]).run()


@cache
def _let_forks_wait() -> None:
    """Let a fork wait for the compiler's lock. A child forked while a thread holds it would wait for ever."""
    if hasattr(os, "register_at_fork"):
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@cache
def _let_the_end_wait() -> None:
    """Let the end of the process wait for the kernel that is being compiled: LLVM would abort if a thread is in it."""
    atexit.register(_end)


def _end() -> None:
    _is_ending.set()
    for compilation in _compilations:
        compilation.join()
