"""Compilation of kernels: once for each element type, state of the sources and processor; kept on disk."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import numba

# Numba imports it with the first kernel, on whichever thread, while a call on another one may look through its types.
import numba.experimental.function_type
from numba.core.registry import CPUDispatcher

from ...errors import HybridCacheError
from .kernel_files import KernelFiles

# `contract` allows fused multiply-add. Not `ninf` or `nnan`: a maximum starts at minus infinity.
_FAST = {"contract", "nsz", "arcp"}
_OPTIONS = {"nogil": True, "error_model": "numpy"}
# Wrappers for callers in Python take a tenth of the time to compile, and only kernels have such callers.
_UNWRAPPED = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class KernelsDisabledError(HybridCacheError, RuntimeError):
    """A kernel is needed, but `NUMBA_DISABLE_JIT` forbids Numba to compile."""


class Kernel(CPUDispatcher):
    """A compiled function that Python calls."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cache = self.files = KernelFiles(self.py_func)

    def compile(self, sig: Any) -> Any:
        """
        Compile for a tuple of types, as a call does, or load the compiled code.

        Raises:
            KernelsDisabledError: `NUMBA_DISABLE_JIT` forbids it.
        """
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            raise KernelsDisabledError(
                "Attention, quantized caches and quantized weights on the CPU need compiled kernels, and "
                "NUMBA_DISABLE_JIT forbids Numba to compile: unset it."
            )
        with self.files.turn():
            try:
                return super().compile(sig)
            finally:
                self.files.end_timer()


# A kernel, and the types of its arguments.
Needed = tuple[Kernel, tuple[Any, ...]]


def jit(function: Callable[..., Any]) -> Kernel:
    """Make a kernel, which Python calls."""
    options = {"nopython": True, "boundscheck": None, "fastmath": _FAST, **_OPTIONS}
    return Kernel(function, targetoptions=options)


def taking_numbers(kernel: Kernel) -> tuple[Any, ...]:
    """The types of a kernel's arguments: booleans where a name begins with `is_`, other numbers are integers."""
    names = signature(kernel.py_func).parameters
    return tuple(numba.boolean if name.startswith("is_") else numba.int64 for name in names)


_njit: Callable[..., Any] = numba.njit
# Decorates functions that other compiled functions call.
jit_function: Callable[..., Any] = _njit(fastmath=_FAST, **_UNWRAPPED)
# Decorates functions that are called for each block or row: LLVM inlines them, so arguments are not passed.
jit_inlined: Callable[..., Any] = _njit(fastmath=_FAST, forceinline=True, **_UNWRAPPED)
# Decorates loops over finite numbers, or whose result is then dropped: minimum and maximum are vector instructions.
jit_finite: Callable[..., Any] = _njit(fastmath={*_FAST, "nnan", "ninf"}, forceinline=True, **_UNWRAPPED)
# Decorates functions that give what torch gives: no operation becomes another one, or a part of another one.
jit_exact: Callable[..., Any] = _njit(fastmath=False, **_UNWRAPPED)
