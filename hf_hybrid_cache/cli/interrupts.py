"""Ctrl-C: exit code 130 at any time, without a traceback; in a conversation it ends what is under way, and no more."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def end_at_once() -> None:
    """Let Ctrl-C end the process from here on: nothing is under way yet that would be left half-way."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets it be ignored
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C do nothing meanwhile, except where it is `heeded`."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _do_nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile, where it is `held_back` otherwise."""
    if signal.getsignal(signal.SIGINT) is not _do_nothing:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(130)
