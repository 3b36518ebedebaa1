"""Compiling a kernel before its first use, beside the prefill."""

import threading

import numpy as np

from .attention import compile_attention

_started: set[np.dtype] = set()
_lock = threading.Lock()


def compile_in_background(element: np.dtype) -> None:
    """
    Start compiling attention over blocks of `element`, once in a process.

    From Numba's cache on disk it takes a quarter of a second, without it four. A call that comes before the end waits.
    """
    with _lock:
        if element in _started:
            return
        _started.add(element)
    threading.Thread(
        target=compile_attention, args=(element,), name=f"compile {element} attention", daemon=True
    ).start()
