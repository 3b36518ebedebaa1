"""Questions and answers about a document: asked, asked again, taken back and kept."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from .answer_settings import AnswerSettings
from .chat_template import SystemMessage, last_turn
from .console import note
from .prompts import PromptError, question_tokens
from .replaced_file import what_is_replaced
from .terminal import without_controls
from .transcript import Transcript

# Of the context; when fewer are left it is said.
FEW_TOKENS = 512
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Turn:
    """
    A question that was asked.

    Attributes:
        start: tokens before it.
        question: its text.
    """

    start: int
    question: str


class Conversation:
    """
    What can be done between the questions about a document, and with them.

    Args:
        transcript: holds the document, or a conversation about it.
        tokenizer: its chat template tells turns apart, if it has one.
        is_saved: whether the transcript comes from a file.
        settings: how answers are made; may be changed between them.
        weights: what is said of the model's, if they are of few bits.
        notes: where remarks go.
    """

    def __init__(
        self,
        transcript: Transcript,
        tokenizer: PreTrainedTokenizerBase,
        is_saved: bool,
        settings: AnswerSettings,
        weights: str | None,
        notes: Console,
    ):
        self.settings = settings
        self._transcript, self._tokenizer, self._is_saved = transcript, tokenizer, is_saved
        self._weights, self._notes = weights, notes
        self._start = len(transcript)
        self._turns: list[Turn] = []
        self._system_tokens: int | None = None
        self._said_that_it_ends = False

    def remark(self, text: str) -> None:
        """Say something that is no answer."""
        note(self._notes, without_controls(text))

    def read_document(self) -> None:
        """
        Compute what is not in the cache yet.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was computed is in the cache.
        """
        seconds = self._transcript.read()
        if seconds is not None:
            self.remark(f"document read in {seconds:.1f} s")

    def show_last_turn(self) -> None:
        """Remind of what was said last, as far as it can be told."""
        token_ids = self._transcript.token_ids
        last = last_turn(self._tokenizer, token_ids)
        if last is None:
            # No character has more than four tokens.
            end = str(self._tokenizer.decode(token_ids[-4 * _SHOWN_CHARACTERS :], skip_special_tokens=True))
            self.remark(f"it ends: {'[...]' * (len(end) > _SHOWN_CHARACTERS)}{end[-_SHOWN_CHARACTERS:]}")
            return
        if last.start is not None:
            self._turns = [Turn(last.start, last.question)]
        self.remark(f"last question: {_shortened(last.question)}\nlast answer: {last.answer}")

    def ask(self, question: str) -> bool:
        """Answer a question; whether any of an answer came."""
        held = self._transcript
        try:
            new = question_tokens(self._tokenizer, held.token_ids, question)
        except PromptError as error:
            self.remark(str(error))
            return False
        before, left = len(held), held.longest - len(held) - len(new)
        if left < 1:
            self.remark(
                f"The conversation has {before:,} tokens, the question {len(new):,}, and the model's context is "
                f"{held.longest:,}. /undo takes back the last question. /forget goes back to the document."
            )
            return False
        self._said_that_it_ends &= held.longest - before < FEW_TOKENS
        is_whole = held.answer(new, min(self.settings.max_new_tokens, left), self.settings.temperature)
        is_answered = len(held) > before
        if is_answered:
            self._turns.append(Turn(before, question))
        self._say_what_ended_it(is_whole)
        return is_answered

    def retry(self) -> None:
        """Ask the last question again."""
        if not self._turns:
            self.remark(self._no_question())
            return
        turn, before = self._turns[-1], list(self._transcript.token_ids)
        if not self.settings.temperature:
            self.remark("temperature 0 takes the likeliest tokens again: /set temperature 0.7 varies the answer")
        self._take_back()
        if not self.ask(turn.question):
            self._transcript.token_ids[:] = before
            self._turns.append(turn)
            self.remark("the answer before stays")

    def undo(self) -> None:
        """Take back the last question and its answer."""
        if not self._turns:
            self.remark(self._no_question())
            return
        question = self._take_back()
        self.remark(f"taken back: {_shortened(question)}")

    def forget(self) -> None:
        """Go back to the document, or to what was loaded."""
        self._transcript.shorten(self._start)
        self._turns = [turn for turn in self._turns if turn.start < self._start]
        self.remark(f"back to {self._start:,} tokens")

    def set_system(self, text: str) -> None:
        """Let the conversation begin with another system message."""
        held = self._transcript
        try:
            message = SystemMessage(self._tokenizer)
            old = self._system_tokens
            if old is None:
                old = message.num_tokens(held.token_ids, self._is_saved)
            new = message.tokens(text)
        except PromptError as error:
            self.remark(str(error))
            return
        more = len(new) - old
        if len(held) + more >= held.longest:
            self.remark(
                f"The conversation has {len(held):,} tokens, would have {more:,} more, and the model's context is "
                f"{held.longest:,}: the message is not set. Shorten it, or /forget what was said."
            )
            return
        held.replace_start(old, new)
        self._turns = [replace(turn, start=turn.start + more) for turn in self._turns]
        self._start += more
        self._system_tokens = len(new)
        self.remark("a system message comes first in the prompt, so the document is read again")
        try:
            self.read_document()
        except KeyboardInterrupt:
            self.remark("the rest is read before the next answer")

    def save(self, name: str, is_forced: bool) -> None:
        """Keep everything in the file of this name; one that is no cache's is replaced only if it is forced."""
        path = Path(os.path.expanduser(name))  # other than Path's, it leaves names of nobody
        try:
            replaced = what_is_replaced(path, is_forced, f"/save! {name}")
            size = self._transcript.save(path) / 2**20
        except (ValueError, OSError, MemoryError) as error:
            self.remark(str(error))
            return
        where = name if replaced is None else f"{name}, in place of {replaced}"
        self.remark(f"{len(self._transcript):,} tokens, {size:,.1f} MiB, are in {where}")

    def tell(self) -> None:
        """Say what the cache holds, and how fast the last answer was."""
        held = self._transcript
        held.compute_last()
        self.remark(repr(held.cache))
        if self._weights is not None:
            self.remark(self._weights)
        self.remark(f"{len(held):,} of {held.longest:,} tokens are taken")
        if held.num_missing:
            self.remark(f"{held.num_missing:,} of them are read before the next answer")
        if held.pace is not None:
            self.remark(f"last answer: {held.pace}")

    def _say_what_ended_it(self, is_whole: bool) -> None:
        """Say why an answer ended, unless it did by itself, and once that the context does."""
        held, limit = self._transcript, self.settings.max_new_tokens
        left = held.longest - len(held)
        if not is_whole:
            self.remark("the answer was ended")
        elif held.is_ended:
            pass
        elif left < 1:
            self.remark(
                f"ended at the model's context of {held.longest:,} tokens: /undo takes back the last question, "
                "/forget goes back to the document"
            )
        else:
            self.remark(f"ended at --max-new-tokens {limit}: /set max_new_tokens {2 * limit} allows more")
        if left < FEW_TOKENS and not self._said_that_it_ends:
            self.remark(f"{left:,} tokens of context left")
        self._said_that_it_ends = left < FEW_TOKENS

    def _no_question(self) -> str:
        return "Nothing was asked" + (", or where it begins cannot be told." if self._is_saved else " yet.")

    def _take_back(self) -> str:
        """Forget the last question, which is returned, and its answer."""
        turn = self._turns.pop()
        self._transcript.shorten(turn.start)
        self._start = min(self._start, turn.start)
        return turn.question


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}[...]"
