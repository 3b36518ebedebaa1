"""How kernels are compiled: once for each element type, state of the sources and processor, and kept on disk."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import numba
from numba.core.registry import CPUDispatcher

from .kernel_files import KernelFiles

# `contract` allows fused multiply-add. Not `ninf` or `nnan`: a maximum starts at minus infinity.
_FAST = {"contract", "nsz", "arcp"}
_OPTIONS = {"nogil": True, "error_model": "numpy"}
# Wrappers for callers in Python take a tenth of the time to compile, and only kernels have such callers.
_UNWRAPPED = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class KernelsDisabledError(RuntimeError):
    """A kernel was needed, and Numba is told not to compile (`NUMBA_DISABLE_JIT`)."""


class Kernel(CPUDispatcher):
    """A compiled function that Python calls."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.files = KernelFiles(self.py_func)
        self.enable_caching()

    def enable_caching(self) -> None:
        """Keep what is compiled."""
        self._cache = self.files

    def compile(self, sig: Any) -> Any:
        """
        Compile for a tuple of types, as a call does, or load what was compiled.

        Raises:
            KernelsDisabledError: Numba is told not to.
        """
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            raise KernelsDisabledError(
                "Attention, codes and weights on the CPU need compiled kernels, and NUMBA_DISABLE_JIT forbids Numba to "
                "compile: unset it."
            )
        with self.files.turn():
            return super().compile(sig)


# A kernel, and the types that it is given.
Needed = tuple[Kernel, tuple[Any, ...]]


def jit(function: Callable[..., Any]) -> Kernel:
    """What Python calls."""
    options = {"nopython": True, "boundscheck": None, "fastmath": _FAST, **_OPTIONS}
    return Kernel(function, targetoptions=options)


def taking_numbers(kernel: Kernel) -> tuple[Any, ...]:
    """The types of arguments that are integers, and booleans where a name begins with `is_` or `has_`."""
    names = signature(kernel.py_func).parameters
    return tuple(numba.boolean if name.startswith(("is_", "has_")) else numba.int64 for name in names)


_njit: Callable[..., Any] = numba.njit
# What other compiled functions call.
jit_part: Callable[..., Any] = _njit(fastmath=_FAST, **_UNWRAPPED)
# The same for what is called for every block or row: its arguments need not be passed.
jit_inlined: Callable[..., Any] = _njit(fastmath=_FAST, forceinline=True, **_UNWRAPPED)
# Likewise for loops over finite numbers, or whose result is thrown away: minimum and maximum become vectors.
jit_finite: Callable[..., Any] = _njit(fastmath={*_FAST, "nnan", "ninf"}, forceinline=True, **_UNWRAPPED)
