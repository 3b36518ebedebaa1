"""Ctrl-C ends a command with exit code 130 and no traceback; in a conversation it ends only the current answer."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


def end_at_once() -> None:
    """Let Ctrl-C end the process from here on, while no work could be left half-done."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets it be ignored
        signal.signal(signal.SIGINT, _end)


def as_exceptions() -> AbstractContextManager[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile."""
    return _exchanged(_end, signal.default_int_handler)


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


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(130)
