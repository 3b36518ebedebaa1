"""Reading questions and commands: with an editor of lines at a terminal, or from standard input."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from ..user_folder import cache_home, make_private
from .console import UsageError

QUOTES = '"""'
PROMPT = "> "
_HISTORY_FILE = "chat_history"
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Typed:
    """
    A question, or a command.

    Attributes:
        text: without white space around it.
        is_quoted: whether it was between triple quotes, and so is a question even if it looks like a command.
    """

    text: str
    is_quoted: bool = False

    @classmethod
    def of(cls, line: str) -> "Typed":
        """Parse a line, or all lines between triple quotes."""
        line = line.strip()
        if not line.startswith(QUOTES):
            return cls(line)
        return cls(line.removeprefix(QUOTES).removesuffix(QUOTES).strip(), is_quoted=True)


@dataclass(frozen=True)
class ChatInput:
    """
    A source of questions and commands.

    Attributes:
        is_terminal: whether a user types them at a terminal.
        read: reads the text of the next one; raises `EOFError` at the end, and `KeyboardInterrupt` at Ctrl-C.
    """

    is_terminal: bool
    read: Callable[[], str]

    def next_line(self) -> Typed | None:
        """Read the next one; `None` at the end. Raises `KeyboardInterrupt` at Ctrl-C."""
        try:
            return Typed.of(self.read())
        except EOFError:
            return None


def is_open(text: str) -> bool:
    """Whether triple quotes begin a text, and no others end it yet."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def shortened(text: str) -> str:
    """A text, or its start where it is long."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}[...]"


def chat_input(keeps_history: bool, say: Callable[[str], None]) -> ChatInput:
    """
    The editor of lines if standard input is a terminal, or else standard input as it is.

    Args:
        keeps_history: whether a file of the user keeps what is typed at a terminal.
        say: prints a remark.

    Raises:
        UsageError: the package that edits lines is missing, or standard input is closed.
    """
    if sys.stdin is None:
        raise UsageError("Standard input is closed: let it come from a terminal, a file or a pipe.")
    shown_on = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if not sys.stdin.isatty() or shown_on is None:
        return ChatInput(False, partial(_plain_text, say))
    return ChatInput(True, _editor(_history_file(say) if keeps_history else None, shown_on))


def _plain_text(say: Callable[[str], None]) -> str:
    """Read a line of standard input, or lines between triple quotes."""
    text = ""
    try:
        text = input()
        while is_open(text):
            text += f"\n{input()}"
    except EOFError:
        if text:
            say(f"{QUOTES} began a text that nothing ended: it is not asked.")
        raise
    return text


def _editor(history: Path | None, shown_on: TextIO) -> Callable[[], str]:
    """Make what reads lines from an editor at a terminal, with a history in a file that exists, or none for `None`."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.input.typeahead import clear_typeahead
        from prompt_toolkit.output import create_output
    except ModuleNotFoundError as error:
        raise UsageError(f'chat at a terminal needs {error.name}: pip install "hf_hybrid_cache[demo]"') from error
    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=Condition(lambda: is_open(session.default_buffer.text)),
        prompt_continuation=" " * len(PROMPT),
        history=InMemoryHistory() if history is None else FileHistory(history),
        enable_suspend=True,
        reserve_space_for_menu=0,
        output=create_output(shown_on),
    )

    def read() -> str:
        # What was typed while an answer came is dropped, so that it is not asked by mistake.
        clear_typeahead(session.app.input)
        with contextlib.suppress(ModuleNotFoundError):  # not a POSIX system
            import termios

            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcflush(sys.stdin, termios.TCIFLUSH)
        return session.prompt()

    return read


def _history_file(say: Callable[[str], None]) -> Path | None:
    """The file of what was typed, which is made if needed; `None`, and a remark, where it cannot be."""
    try:
        path = cache_home() / _HISTORY_FILE
        make_private(path)
    except OSError as error:
        say(f"What is typed is not kept for the next time: {error}.")
        return None
    return path
