"""Compiling kernels before their first use: beside the prefill, or as fast as it goes."""

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

from .attention import attention_kernels
from .coded_attention import attend_coded, coded_attention_kernels
from .coding import coding_kernels
from .compiled import Needed
from .gemm import uses_gemm
from .key_index import index_kernels
from .panel_gemm import gemm_kernels
from .panel_products import panel_product_kernels
from .panels import panel_kernels
from .plain_products import plain_product_kernels
from .prefill import uses_prefill_kernel
from .prefill_attention import prefill_kernels
from .selected_attention import selected_attention_kernels
from .selected_coded_attention import selected_code_kernels
from .threads import get_num_threads

# From disk it takes less.
_SECONDS_TO_LOAD = 2.0
# For other processes to compile what is needed here too; then the first call waits for it.
_SECONDS_FOR_OTHERS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.05

_compilations: list["_Compilation"] = []
_is_ending = threading.Event()


@cache
def compile_in_background(element: np.dtype, is_coded: bool = False, is_selected: bool = False) -> None:
    """
    Start compiling attention over blocks of `element`, over coded ones beside them and over chosen pages, once in a
    process.

    From disk it takes a quarter of a second, otherwise some seconds. A call that comes before the end waits, and so
    does a fork of the process. The end of the process waits for the kernel at hand.
    """
    _started(_needed(element, is_coded, is_selected))


@cache
def compile_coded_weights_in_background(element: np.dtype, has_experts: bool) -> None:
    """The same for coding weights of `element`, for products with them, and for experts that have such weights."""
    needed = panel_kernels(element)
    if uses_gemm(is_bfloat16=element == np.uint16):
        needed += gemm_kernels()
    _started([*needed, *panel_product_kernels()[: 1 + has_experts]])


@cache
def compile_plain_weights_in_background() -> None:
    """The same for products with weights in full precision that tokens choose, and for experts that have such."""
    _started(plain_product_kernels())


def _needed(element: np.dtype, is_coded: bool, is_selected: bool = False) -> list[Needed]:
    """Those first that are needed first."""
    needed = coding_kernels(element) if is_coded else []
    if uses_prefill_kernel(element):
        needed += prefill_kernels(element)
    needed += attention_kernels(element)
    if is_coded:
        needed += coded_attention_kernels(element)
    if is_selected:
        needed += index_kernels(element)
        needed += (selected_code_kernels if is_coded else selected_attention_kernels)(element)
    return needed


class _Compilation(threading.Thread):
    """
    Compiles some kernels, one after the other.

    Stops where the process ends, and at an error, which the first call meets too.

    Args:
        needed: what is compiled. A kernel that another process compiles at the moment is left for later.
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


def _started(needed: Iterable[Needed]) -> _Compilation | None:
    """A compilation that has begun; `None` where there are no more threads to be had."""
    _let_forks_wait()
    _let_the_end_wait()
    compilation = _Compilation(needed)
    try:
        compilation.start()
    except RuntimeError:
        return None
    _compilations.append(compilation)
    return compilation


def compile_and_wait(element: np.dtype, is_coded: bool, on_wait: Callable[[], None]) -> None:
    """
    Compile the same now, on two cores if nothing is on disk yet, and more than one thread may be used.

    The second one is another process: in one, Numba compiles one kernel at a time.

    Args:
        element: as in `compile_in_background`.
        is_coded: likewise.
        on_wait: called once if it takes more than reading from disk.

    Raises:
        KernelsDisabledError: Numba is told not to compile.
    """
    needed, beside = _needed(element, is_coded), None
    if is_coded and get_num_threads() > 1 and not attend_coded.files.exist():
        program = "import numpy, sys; from hf_hybrid_cache.kernels import coded_attention; "
        program += "[(kernel, types)] = coded_attention.coded_attention_kernels(numpy.dtype(sys.argv[1])); "
        program += "kernel.compile(types)"
        with contextlib.suppress(OSError):  # then it is compiled here
            beside = subprocess.Popen([sys.executable, "-c", program, element.name], stderr=subprocess.DEVNULL)
    try:
        compilation = _started(needed if beside is None else [each for each in needed if each[0] is not attend_coded])
        if compilation is not None:
            compilation.join(_SECONDS_TO_LOAD)
            if compilation.is_alive() or beside is not None:
                on_wait()
            compilation.join()
        if beside is not None:
            beside.wait()
        for kernel, types in needed:
            kernel.compile(types)
    finally:
        if beside is not None:
            beside.kill()  # after an interrupt
            beside.wait()


@cache
def _let_forks_wait() -> None:
    """A process that is forked while another thread compiles would wait for that thread, which it does not have."""
    if hasattr(os, "register_at_fork"):
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@cache
def _let_the_end_wait() -> None:
    """LLVM aborts a process that ends while a thread is in it: wait for the kernel at hand, and begin no other one."""
    atexit.register(_end)


def _end() -> None:
    _is_ending.set()
    for compilation in _compilations:
        compilation.join()
