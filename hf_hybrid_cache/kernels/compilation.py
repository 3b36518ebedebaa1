"""Compiling a kernel before its first use, beside the prefill."""

import threading

import numpy as np

from .attention import compile_attention
from .coded_attention import compile_coded_attention
from .coding import compile_coding

_started: set[tuple[np.dtype, bool]] = set()
_lock = threading.Lock()


def compile_in_background(element: np.dtype, is_coded: bool = False) -> None:
    """
    Start compiling attention over blocks of `element`, and over coded ones beside them, once in a process.

    From Numba's cache on disk it takes a quarter of a second, without it some seconds. A call that comes before the end
    waits.
    """
    with _lock:
        if (element, is_coded) in _started:
            return
        _started.add((element, is_coded))
    threading.Thread(
        target=_compile, args=(element, is_coded), name=f"compile {element} attention", daemon=True
    ).start()


def _compile(element: np.dtype, is_coded: bool) -> None:
    if is_coded:
        compile_coding(element)
        compile_coded_attention(element)
    compile_attention(element)
