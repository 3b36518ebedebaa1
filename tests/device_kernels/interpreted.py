"""Triton's interpreter, where there is no GPU to compile for."""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "TRITON_INTERPRET"


def why_not() -> str | None:
    """Return the reason why kernels for devices do not run here at all; `None` if they do."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def load() -> None:
    """
    Import Triton and the kernels so that they are interpreted, unless there is a GPU.

    Before anything else imports Triton, which decides once: at import.
    """
    if why_not() is None and not torch.cuda.is_available():
        with told():
            importlib.import_module("triton.language")
            importlib.import_module("hf_hybrid_cache.device_kernels.split_kernels")


@contextmanager
def told() -> Iterator[None]:
    """Let caches that are made inside the block use the kernels on any device, as they do on a GPU anyway."""
    if torch.cuda.is_available():
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
