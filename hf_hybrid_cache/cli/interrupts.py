"""Ctrl-C: exit code 130 at any time, without a traceback."""

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


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(130)
