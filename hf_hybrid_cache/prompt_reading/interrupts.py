"""Handling Ctrl-C while a prompt is read."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def finishing() -> Iterator[Callable[[], bool]]:
    """
    Let Ctrl-C end the block at the next safe moment, and raise `KeyboardInterrupt` afterwards.

    Gives what tells whether it was pressed. Pressed again it does what it did before. On threads that get no signals,
    and where something else takes them, nothing changes.
    """
    was_pressed = False
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if was_pressed:
        raise KeyboardInterrupt
