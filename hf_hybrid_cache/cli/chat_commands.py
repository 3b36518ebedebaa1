"""The lines that are typed into a conversation, at a terminal or from standard input: questions and / commands."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

from rich.console import Console

from ..chat.forms import FORMS
from ..chat.settings import AnswerSettings, SettingError
from ..documents import DocumentError
from ..prefix_store import PrefixStoreError, PrefixStoreFolderError
from ..system.user_folder import cache_home, make_private
from .console import UsageError, end_line, json_object, note, out_of_memory, write
from .task import drafts_text, on_thought, say_what_is_read, why_no_more

if TYPE_CHECKING:
    from ..chat import Chat

_QUOTES = '"""'
_PROMPT = "> "
_HISTORY_FILE = "chat_history"
_SHOWN_CHARACTERS = 300
# A remark warns of fewer tokens that are left in the context.
_WARN_BELOW_TOKENS = 512
_WAYS_OUT = " /undo takes back the last question, /forget all of them."
_SETTINGS = {field.name: field for field in fields(AnswerSettings)}
# What can be typed beside questions, and what it does.
COMMANDS = {
    "/stats": "tokens, memory, and the speed of the last answer",
    "/undo": "take back the last question and its answer",
    "/forget": "go back to the document alone",
    "/document FILE": "add a document, or several: they come before all questions, and all is read again",
    "/system TEXT": "set the system message; the document is read again",
    "/set NAME VALUE": f"for the next answers: {', '.join(_SETTINGS)}; without VALUE the default",
    "/help": "this list",
    "/quit": "end, as /bye, exit, quit and Ctrl-D do",
    _QUOTES: "begins and ends a question of several lines, or one that looks like a command",
}
_HELP = "\n".join(f"{typed:<17}  {what}" for typed, what in COMMANDS.items())


@dataclass(frozen=True)
class ChatInput:
    """
    A source of questions and commands.

    Attributes:
        is_terminal: whether a user types them at a terminal.
        read: reads the text of the next one; raises `EOFError` at the end, and `KeyboardInterrupt` at Ctrl-C.
        drop: drops what was typed since the last one was read, or all; returns whether there was any.
    """

    is_terminal: bool
    read: Callable[[], str]
    drop: Callable[[bool], bool] = lambda _: False

    def next_line(self) -> str | None:
        """Read the next one; `None` at the end. Raises `KeyboardInterrupt` at Ctrl-C."""
        try:
            return self.read().strip()
        except EOFError:
            return None


def is_open(text: str) -> bool:
    """Whether triple quotes begin a text, and no others end it yet."""
    text = text.strip()
    return text.startswith(_QUOTES) and (len(text) < 2 * len(_QUOTES) or not text.endswith(_QUOTES))


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
    return ChatInput(True, *_editor(_history_file(say) if keeps_history else None, shown_on))


def _plain_text(say: Callable[[str], None]) -> str:
    """Read a line of standard input, or lines between triple quotes."""
    text = ""
    try:
        text = input()
        while is_open(text):
            text += f"\n{input()}"
    except EOFError:
        if text:
            say(f"{_QUOTES} began a text that nothing ended: it is not asked.")
        raise
    return text


def _editor(history: Path | None, shown_on: TextIO) -> tuple[Callable[[], str], Callable[[bool], bool]]:
    """Make `read` and `drop` of an editor at a terminal, with a history in a file that exists, or none for `None`."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
        from prompt_toolkit.key_binding import KeyPress
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle
    except ModuleNotFoundError as error:
        raise UsageError(f'chat at a terminal needs {error.name}: pip install "hf_hybrid_cache[demo]"') from error
    session: PromptSession[str] = PromptSession(
        _PROMPT,
        multiline=Condition(lambda: is_open(session.default_buffer.text)),
        prompt_continuation=" " * len(_PROMPT),
        history=InMemoryHistory() if history is None else FileHistory(history),
        enable_suspend=True,
        reserve_space_for_menu=0,
        completer=WordCompleter(
            ["".join(typed.partition(" ")[:2]) for typed in COMMANDS if typed != _QUOTES], sentence=True
        ),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        output=create_output(shown_on),
    )

    def typed() -> list[KeyPress]:
        """Take what the terminal has of standard input, also of a line that is not ended."""
        keys = list[KeyPress]()
        with session.input.raw_mode():
            while more := session.input.read_keys():
                keys += more
            return keys + session.input.flush_keys()

    def read() -> str:
        text = session.prompt()
        store_typeahead(session.input, typed())  # before the answer
        return text

    def drop(is_all: bool) -> bool:
        return bool(typed() + (get_typeahead(session.input) if is_all else []))

    return read, drop


def _history_file(say: Callable[[str], None]) -> Path | None:
    """The file of what was typed, which is made if needed; `None`, and a remark, where it cannot be."""
    try:
        path = cache_home() / _HISTORY_FILE
        make_private(path)
    except OSError as error:
        say(f"What is typed is not kept for the next time: {error}.")
        return None
    return path


class ChatCommands:
    """
    Asks what is typed, and runs commands.

    Args:
        chat: the conversation.
        out: receives answers.
        notes: receives remarks.
        weights_text: describes the model's weights; `None` where none are quantized.
        drop: see `ChatInput`; what is typed during an answer is not asked by mistake, nor more where Ctrl-C ends one.
    """

    def __init__(
        self, chat: "Chat", out: Console, notes: Console, weights_text: str | None, drop: Callable[[bool], bool]
    ):
        self._chat, self._out, self._notes, self._weights_text = chat, out, notes, weights_text
        self._drop = drop
        self._has_warned = False
        self._commands: dict[str, Callable[[str], object]] = {
            "/stats": lambda _: self._tell(),
            "/undo": lambda _: self._undo(),
            "/forget": lambda _: self._forget(),
            "/document": self._attach,
            "/system": self._set_system,
            "/set": self._set,
            "/help": lambda _: self._remark(_HELP),
        }

    def take(self, text: str) -> bool:
        """Answer a question or run a command; return whether the conversation goes on."""
        is_quoted = text.startswith(_QUOTES)  # a question, even if it looks like a command
        if is_quoted:
            text = text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
        if text != text.encode(errors="replace").decode():  # a terminal passed on another encoding
            self._remark("That is not UTF-8 text.")
        elif is_quoted or not text.startswith("/"):
            if not is_quoted and text in ("exit", "quit"):
                return False
            if text:
                self._ask(text)
        elif text in ("/quit", "/bye"):
            return False
        else:
            name, _, argument = text.partition(" ")
            self._commands.get(name, lambda _: self._remark(f"There is no {name}.\n{_HELP}"))(argument.strip())
        return True

    def _remark(self, text: str) -> None:
        note(self._notes, text)

    def _ask(self, question: str) -> None:
        """Ask, write the answer as it comes, and remark why it ended."""
        from ..chat import PromptError

        chat = self._chat
        self._has_warned &= chat.num_free < _WARN_BELOW_TOKENS
        is_ended, error_text = False, ""
        try:
            with contextlib.closing(chat.ask(question)) as answer:
                for text in answer:
                    write(self._out, text)
        except PromptError as error:
            self._remark(f"{error}{_WAYS_OUT if chat.turns else ''}")
            return
        except SettingError as error:
            self._remark(str(error))
            return
        except KeyboardInterrupt:
            is_ended = True
        except (MemoryError, RuntimeError) as error:
            error_text = f"{out_of_memory(error)}\nThe question is taken back.{_WAYS_OUT if chat.turns else ''}"
        end_line(self._out)
        if error_text:
            self._remark(error_text)
        else:
            self._remark_end("interrupted" if is_ended or chat.last is None else chat.last.finish_reason)
        if self._drop(is_ended):
            self._remark(f"what {'else was typed' if is_ended else 'was typed during the answer'} is dropped")

    def _remark_end(self, reason: str) -> None:
        """Remark why an answer ended, unless the model ended it, and warn once of a context that is nearly full."""
        chat, limit = self._chat, self._chat.settings.max_new_tokens
        if reason == "interrupted":
            self._remark("the answer was ended")
        elif reason == "context":
            self._remark(f"ended at the context of {chat.context:,} tokens.{_WAYS_OUT}")
        elif reason == "length" and not (chat.last and chat.last.is_thought_alone):
            self._remark(f"ended at --max-new-tokens {limit}: /set max_new_tokens {2 * limit} allows more")
        of_thought = ("/set thinking no", "/set max_thinking_tokens")
        if reason != "interrupted" and chat.last and (said := on_thought(chat.last, chat.settings, *of_thought)):
            self._remark(said)
        if chat.num_free < _WARN_BELOW_TOKENS and not self._has_warned:
            self._remark(f"{chat.num_free:,} tokens of context left")
        self._has_warned = chat.num_free < _WARN_BELOW_TOKENS

    def _tell(self) -> None:
        """Remark what the cache holds, and how fast the last answer was."""
        chat = self._chat
        self._remark(repr(chat.cache))
        if self._weights_text is not None:
            self._remark(self._weights_text)
        self._remark(f"{len(chat.token_ids):,} of {chat.context:,} tokens are taken")
        if chat.num_missing > 1:
            self._remark(f"{chat.num_missing:,} of them are read before the next answer")
        if chat.last is not None:
            speed = chat.last.tokens_per_second
            after = "" if speed is None else f", {speed:.1f} tokens/s after it"
            drafts = drafts_text(chat.last.drafted_tokens, chat.last.accepted_tokens)
            self._remark(f"last answer: {drafts}first token after {chat.last.first_token_seconds:.2f} s{after}")

    def _undo(self) -> None:
        question = self._chat.undo()
        self._remark("Nothing was asked yet." if question is None else f"taken back: {shortened(question)}")
        self._keep()

    def _forget(self) -> None:
        self._chat.forget()
        self._remark(f"back to {len(self._chat.token_ids):,} tokens")
        self._keep()

    def _attach(self, argument: str) -> None:
        """Add documents whose names were typed: one with spaces, or several, which may be quoted as a shell does."""
        try:
            names = [argument] if os.path.exists(argument) else shlex.split(argument)
        except ValueError:  # a quotation is not ended
            names = [argument]
        if not names:
            self._remark("Say which document it is: /document FILE")
            return
        from ..chat import PromptError

        try:
            self._chat.attach(names)
        except (DocumentError, PromptError) as error:
            self._remark(str(error))
            return
        say_what_is_read(self._chat, why_no_more(self._chat), self._out, self._notes)
        self._remark(f"{self._chat.num_free:,} tokens are left to talk")
        self._keep()

    def _set_system(self, text: str) -> None:
        if not text:
            self._remark("Say what the message is: /system TEXT")
            return
        from ..chat import PromptError

        try:
            self._chat.system = text
        except PromptError as error:
            self._remark(str(error))
            return
        self._remark("a system message comes first in the prompt, so the document is read again")
        self._keep()

    def _keep(self) -> None:
        """Read what the cache lacks, and keep the conversation, if there is a store."""
        try:
            self._chat.read()
            self._chat.keep()
        except KeyboardInterrupt:
            self._remark("the rest is read before the next answer")
        except (PrefixStoreError, PrefixStoreFolderError) as error:
            self._remark(f"the conversation is not kept: {error}")
        except (MemoryError, RuntimeError) as error:
            self._remark(f"{out_of_memory(error)}\nThe rest is read before the next answer.")

    def _set(self, argument: str) -> None:
        """Change a setting, or show all of them."""
        name, _, value = argument.partition(" ")
        try:
            if name:
                self._chat.settings = replace(self._chat.settings, **{name: _parsed(name, value.strip())})
        except SettingError as error:
            self._remark(str(error))
            return
        shown = vars(self._chat.settings).items()
        texts = ((name, " or ".join(map(repr, value)) if isinstance(value, tuple) else value) for name, value in shown)
        self._remark(", ".join(f"{name} {text}" for name, text in texts if text not in (None, "")))


def _parsed(name: str, value: str) -> Any:
    """Parse a setting; raises `SettingError` if there is none of that name, or it cannot have this value."""
    if name not in _SETTINGS:
        raise SettingError(f"There is no setting {name!r}: {', '.join(_SETTINGS)} can be set.")
    field = _SETTINGS[name]
    if not value:
        return field.default
    if name in ("stop", *FORMS):
        return (value,) if name == "stop" else tuple(value.split()) if name == "choices" else value
    try:
        if name == "thinking":
            return {"yes": True, "no": False}[value]
        if name == "chat_template_kwargs":
            return json_object(value)
    except (KeyError, ValueError):
        raise SettingError(f"{name} must be {'yes or no' if name == 'thinking' else 'JSON'}, got {value!r}.") from None
    kind = int if int in (field.type, *get_args(field.type)) else float
    try:
        return kind(value)
    except ValueError:
        which = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name} must be {which}, got {value!r}.") from None
