"""Ctrl-C ends a command with exit code 130 and no traceback; in a conversation it ends only the current answer."""

import _thread
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from .console import _end

_Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """
    Let Ctrl-C raise `KeyboardInterrupt` meanwhile, also where it meets a destructor.

    An object that Ctrl-C left half-made says nothing when it goes: no `AttributeError` of a destructor is reported.
    """
    report = sys.unraisablehook

    def judge(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # which Python drops: once more, after the destructor
            threading.Timer(0.01, _thread.interrupt_main).start()
        elif not issubclass(unraisable.exc_type, AttributeError):
            report(unraisable)

    sys.unraisablehook = judge
    try:
        with _exchanged(_end, signal.default_int_handler):
            yield
    except KeyboardInterrupt as interrupt:
        traceback.clear_frames(interrupt.__traceback__)  # half-made objects go here, not when the process ends
        raise
    finally:
        sys.unraisablehook = report


def ignoring_interrupts() -> AbstractContextManager[None]:
    """Let Ctrl-C do nothing meanwhile, except inside of `allowing_interrupts`."""
    return _exchanged(signal.default_int_handler, _do_nothing)


def allowing_interrupts() -> AbstractContextManager[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile, inside of `ignoring_interrupts`."""
    return _exchanged(_do_nothing, signal.default_int_handler)


@contextlib.contextmanager
def _exchanged(before: _Handler, meanwhile: _Handler) -> Iterator[None]:
    """Let the function `meanwhile` handle Ctrl-C if `before` handles it; otherwise change nothing."""
    if signal.getsignal(signal.SIGINT) is not before:
        yield
        return
    signal.signal(signal.SIGINT, meanwhile)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
