"""The lines that can be typed into a conversation: questions, and commands that begin with /."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from typing import Any, get_args

from rich.console import Console

from ..chat import AnswerSettings, Chat, PromptError, SettingError
from ..prefix_store import PrefixStoreError, PrefixStoreFolderError
from .chat_input import QUOTES, Typed, shortened
from .console import note, out_of_memory, write

# A remark warns of fewer tokens that are left in the context.
_WARN_BELOW_TOKENS = 512
_WAYS_OUT = " /undo takes back the last question, /forget all of them."
_SETTINGS = {field.name: field for field in fields(AnswerSettings)}
_HELP = f"""\
/stats             tokens, memory, and the speed of the last answer
/retry             ask the last question again
/undo              take back the last question and its answer
/forget            go back to the document alone
/system TEXT       set the system message; the document is read again
/set NAME VALUE    for the next answers: {", ".join(_SETTINGS)}; without VALUE the default
/help              this list
/quit              end, as /bye, exit, quit and Ctrl-D do
{QUOTES}                begins and ends a question of several lines, or one that looks like a command"""


class ChatCommands:
    """
    Asks what is typed, and runs commands.

    Args:
        chat: the conversation.
        out: receives answers.
        notes: receives remarks.
        weights_text: describes the model's weights; `None` where none are quantized.
    """

    def __init__(self, chat: Chat, out: Console, notes: Console, weights_text: str | None):
        self._chat, self._out, self._notes, self._weights_text = chat, out, notes, weights_text
        self._has_warned = False
        self._commands: dict[str, Callable[[str], object]] = {
            "/stats": lambda _: self._tell(),
            "/retry": lambda _: self._retry(),
            "/undo": lambda _: self._undo(),
            "/forget": lambda _: self._forget(),
            "/system": self._set_system,
            "/set": self._set,
            "/help": lambda _: self._remark(_HELP),
        }

    def take(self, typed: Typed) -> bool:
        """Answer a question or run a command; return whether the conversation goes on."""
        text = typed.text
        if text != text.encode(errors="replace").decode():  # a terminal passed on another encoding
            self._remark("That is not UTF-8 text.")
        elif typed.is_quoted or not text.startswith("/"):
            if not typed.is_quoted and text in ("exit", "quit"):
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

    def _ask(self, question: str) -> bool:
        """Ask, write the answer as it comes, and remark why it ended; return whether it has any token."""
        chat, before = self._chat, len(self._chat.turns)
        self._has_warned &= chat.num_free < _WARN_BELOW_TOKENS
        is_ended, error_text = False, ""
        try:
            with closing(chat.ask(question)) as answer:
                for text in answer:
                    write(self._out, text)
        except PromptError as error:
            self._remark(f"{error}{_WAYS_OUT if chat.turns else ''}")
            return False
        except KeyboardInterrupt:
            is_ended = True
        except (MemoryError, RuntimeError) as error:
            error_text = f"{out_of_memory(error)}\nThe question is taken back.{_WAYS_OUT if chat.turns else ''}"
        write(self._out, "\n")
        if error_text:
            self._remark(error_text)
        else:
            self._remark_end("interrupted" if is_ended or chat.last is None else chat.last.finish_reason)
        return len(chat.turns) > before

    def _remark_end(self, reason: str) -> None:
        """Remark why an answer ended, unless the model ended it, and warn once of a context that is nearly full."""
        chat, limit = self._chat, self._chat.settings.max_new_tokens
        if reason == "interrupted":
            self._remark("the answer was ended")
        elif reason == "context":
            self._remark(f"ended at the model's context of {chat.context:,} tokens.{_WAYS_OUT}")
        elif reason == "length":
            self._remark(f"ended at --max-new-tokens {limit}: /set max_new_tokens {2 * limit} allows more")
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
            self._remark(f"last answer: first token after {chat.last.first_token_seconds:.2f} s{after}")

    def _retry(self) -> None:
        if not self._chat.turns:
            self._remark("Nothing was asked yet.")
            return
        if not self._chat.settings.temperature:
            self._remark("temperature 0 takes the likeliest tokens again: /set temperature 0.7 varies the answer")
        turn = self._chat.turns[-1]
        self._chat.undo()
        if not self._ask(turn.question):
            self._chat.turns.append(turn)
            self._remark("the answer before stays")

    def _undo(self) -> None:
        question = self._chat.undo()
        self._remark("Nothing was asked yet." if question is None else f"taken back: {shortened(question)}")
        self._keep()

    def _forget(self) -> None:
        self._chat.forget()
        self._remark(f"back to {len(self._chat.token_ids):,} tokens")
        self._keep()

    def _set_system(self, text: str) -> None:
        if not text:
            self._remark("Say what the message is: /system TEXT")
            return
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
        self._remark(", ".join(f"{name} {value}" for name, value in shown if value not in (None, ())))


def _parsed(name: str, value: str) -> Any:
    """Parse a setting; raises `SettingError` if there is none of that name, or it cannot have this value."""
    if name not in _SETTINGS:
        raise SettingError(f"There is no setting {name!r}: {', '.join(_SETTINGS)} can be set.")
    field = _SETTINGS[name]
    if not value:
        return field.default
    if name == "stop":
        return (value,)
    kind = int if int in (field.type, *get_args(field.type)) else float
    try:
        return kind(value)
    except ValueError:
        which = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name} must be {which}, got {value!r}.") from None
