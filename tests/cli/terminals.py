"""A program at a terminal, and what it shows there."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from types import TracebackType
from typing import Self

CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\b]")
PROMPT = ">"  # the space after it is a movement of the cursor
CTRL_C, CTRL_D, ENTER, UP = "\x03", "\x04", "\r", "\x1b[A"


class Terminal:
    """
    Runs Python with these arguments at a terminal of its own. A context manager, which ends it.

    Args:
        arguments: of Python.
        environment: added to that of this process.
    """

    def __init__(self, *arguments: object, **environment: str):
        self._handle, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 200, 0, 0))
        self._running = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            # Nobody answers where the cursor is.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.kill()
        self._running.wait()
        os.close(self._handle)

    def type(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def enter(self, text: str) -> None:
        """Type a line once the program asks for it."""
        self.wait_for(PROMPT)
        self.type(text + ENTER)

    def wait_for(self, text: str) -> str:
        """Wait until the text is shown; return what was shown since the last call."""
        while text not in (shown := CONTROL_SEQUENCE.sub("", self._shown)):
            assert select.select([self._handle], [], [], 120)[0], f"{text!r} is not shown, but {shown!r}"
            try:
                self._shown += os.read(self._handle, 100_000).decode(errors="replace")
            except OSError:  # the program has ended
                raise AssertionError(f"{text!r} was not shown, but {shown!r}") from None
        before, _, self._shown = shown.partition(text)
        return before

    def exit_code(self) -> int:
        """Wait for the end, and return the exit code."""
        return self._running.wait(120)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Where tests run in the background of a shell, interrupts would be ignored by inheritance.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
