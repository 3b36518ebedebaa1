"""How kernels are compiled: once for each element type and processor, kept on disk by Numba."""

from collections.abc import Callable
from typing import Any

import numba

# `contract` allows fused multiply-add. Not `ninf` or `nnan`: a maximum starts at minus infinity.
_FAST = {"contract", "nsz", "arcp"}
_OPTIONS = {"nogil": True, "error_model": "numpy"}
# Wrappers for callers in Python take a tenth of the time to compile, and only kernels have such callers.
_UNWRAPPED = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_njit: Callable[..., Any] = numba.njit
# What Python calls.
jit: Callable[..., Any] = _njit(cache=True, fastmath=_FAST, **_OPTIONS)
# What other compiled functions call.
jit_part: Callable[..., Any] = _njit(fastmath=_FAST, **_UNWRAPPED)
# The same for what is called for every block or row: its arguments need not be passed.
jit_inlined: Callable[..., Any] = _njit(fastmath=_FAST, forceinline=True, **_UNWRAPPED)
# Likewise for loops over finite numbers, or whose result is thrown away: minimum and maximum become vectors.
jit_finite: Callable[..., Any] = _njit(fastmath={*_FAST, "nnan", "ninf"}, forceinline=True, **_UNWRAPPED)
