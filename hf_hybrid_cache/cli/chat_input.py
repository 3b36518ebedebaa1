"""What is typed into a conversation: edited at a terminal, or read as it comes."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from ..user_folder import cache_home, make_private
from .console import UsageError

QUOTES = '"""'
PROMPT = "> "
_HISTORY_FILE = "chat_history"


@dataclass(frozen=True)
class Typed:
    """
    A question, or a command.

    Attributes:
        text: without white space around it.
        is_quoted: it was between triple quotes, so it is a question whatever it begins with.
    """

    text: str
    is_quoted: bool = False

    @classmethod
    def of(cls, line: str) -> "Typed":
        """Of what was typed, which is not open any more."""
        line = line.strip()
        if not line.startswith(QUOTES):
            return cls(line)
        return cls(line.removeprefix(QUOTES).removesuffix(QUOTES).strip(), is_quoted=True)


class ChatInput(Protocol):
    """
    Where questions come from.

    Attributes:
        is_terminal: whether somebody types them.
    """

    is_terminal: bool

    def next_line(self) -> Typed | None:
        """
        What is typed next; `None` at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C instead.
        """


def is_open(text: str) -> bool:
    """Whether triple quotes have begun a text of several lines and not ended it."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def chat_input(keeps_history: bool, say: Callable[[str], None]) -> ChatInput:
    """
    Standard input.

    Args:
        keeps_history: in a file of the user, if it is a terminal.
        say: what has to be remarked.

    Raises:
        UsageError: the package that edits lines is missing.
    """
    shown_on = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if not sys.stdin.isatty() or shown_on is None:
        return PlainInput(say)
    return TerminalInput(_history_file(say) if keeps_history else None, shown_on)


class PlainInput:
    """
    Lines as they come.

    Args:
        say: what has to be remarked.
    """

    is_terminal = False

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def next_line(self) -> Typed | None:
        text = ""
        try:
            text = input()
            while is_open(text):
                text += f"\n{input()}"
        except EOFError:
            if text:
                self._say(f"{QUOTES} began a text that nothing ended: it is not asked.")
            return None
        return Typed.of(text)


class TerminalInput:
    """
    Lines that can be edited, with a history.

    Args:
        history: file that keeps it, which is there; `None` to forget it.
        shown_on: what is typed.

    Raises:
        UsageError: the package that edits lines is missing.
    """

    is_terminal = True

    def __init__(self, history: Path | None, shown_on: TextIO):
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.filters import Condition
            from prompt_toolkit.history import FileHistory, InMemoryHistory
            from prompt_toolkit.output import create_output
        except ModuleNotFoundError as error:
            raise UsageError(f'chat at a terminal needs {error.name}: pip install "hf_hybrid_cache[demo]"') from error
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=Condition(lambda: is_open(self._session.default_buffer.text)),
            prompt_continuation=" " * len(PROMPT),
            history=InMemoryHistory() if history is None else FileHistory(history),
            enable_suspend=True,
            reserve_space_for_menu=0,
            output=create_output(shown_on),
        )

    def next_line(self) -> Typed | None:
        self._drop_what_was_typed_meanwhile()
        try:
            return Typed.of(self._session.prompt())
        except EOFError:
            return None

    def _drop_what_was_typed_meanwhile(self) -> None:
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.app.input)
        try:
            import termios
        except ModuleNotFoundError:  # not a POSIX system
            return
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _history_file(say: Callable[[str], None]) -> Path | None:
    try:
        path = cache_home() / _HISTORY_FILE
        make_private(path)
    except OSError as error:
        say(f"What is typed is not kept for the next time: {error}.")
        return None
    return path
