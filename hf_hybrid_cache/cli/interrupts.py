"""Ctrl-C: exit code 130 at any time, without a traceback; in a conversation it ends what is under way, and no more."""

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
    """Let Ctrl-C end the process from here on: nothing is under way yet that would be left half-way."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets it be ignored
        signal.signal(signal.SIGINT, _end)


def as_exceptions() -> AbstractContextManager[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile."""
    return _exchanged(_end, signal.default_int_handler)


def held_back() -> AbstractContextManager[None]:
    """Let Ctrl-C do nothing meanwhile, except where it is `heeded`."""
    return _exchanged(signal.default_int_handler, _do_nothing)


def heeded() -> AbstractContextManager[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile, where it is `held_back` otherwise."""
    return _exchanged(_do_nothing, signal.default_int_handler)


@contextlib.contextmanager
def _exchanged(before: _Handler, meanwhile: _Handler) -> Iterator[None]:
    """Let another function handle Ctrl-C, where the first one does; elsewhere nothing changes."""
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
