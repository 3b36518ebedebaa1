"""How kernels are compiled: once for each element type and processor, kept on disk by Numba."""

from collections.abc import Callable
from typing import Any

import numba

# `contract` allows fused multiply-add. Not `ninf` or `nnan`: a maximum starts at minus infinity.
_FAST = {"contract", "nsz", "arcp"}

jit: Callable[..., Any] = numba.njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
# For loops over numbers that are finite, or whose result is thrown away: minimum and maximum become vectors.
jit_finite: Callable[..., Any] = numba.njit(
    cache=True, nogil=True, fastmath={*_FAST, "nnan", "ninf"}, error_model="numpy"
)
