"""Questions and answers about a document: asking, asking again, undoing and saving."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..console import note, out_of_memory
from ..replaced_file import replaced_file
from ..runs.prompts import PromptError, question_tokens
from .answer_settings import AnswerSettings
from .chat_template import LastTurn, SystemMessage, last_turn
from .transcript import Transcript

# A remark warns of fewer tokens that are left in the context.
FEW_TOKENS = 512
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Turn:
    """
    A question that was asked.

    Attributes:
        start: the number of tokens before it.
        question: its text.
    """

    start: int
    question: str


class Conversation:
    """
    All that a user can do in a conversation about a document.

    Args:
        transcript: has the tokens of the document, or of a conversation about it.
        tokenizer: of the model; its chat template tells turns from each other.
        is_saved: whether the transcript comes from a file, or is a conversation that was kept.
        document_tokens: how many of its tokens are the document's; `None` where the file does not tell.
        settings: how answers are generated, which `/set` changes.
        weights_text: describes the model's weights; `None` where no weights are quantized.
        notes: receives remarks.
    """

    def __init__(
        self,
        transcript: Transcript,
        tokenizer: PreTrainedTokenizerBase,
        is_saved: bool,
        document_tokens: int | None,
        settings: AnswerSettings,
        weights_text: str | None,
        notes: Console,
    ):
        self.settings = settings
        self._transcript, self._tokenizer, self._is_saved = transcript, tokenizer, is_saved
        self._weights_text, self._notes = weights_text, notes
        self._knows_document = document_tokens is not None
        # Where the document's end is not known, /forget goes back to what was loaded.
        self._start = len(transcript) if document_tokens is None else document_tokens
        self._turns: list[Turn] = []
        self._system_tokens: int | None = None
        self._has_warned = False

    @property
    def _document_tokens(self) -> int | None:
        return self._start if self._knows_document else None

    def remark(self, text: str) -> None:
        """Print a line that is not an answer."""
        note(self._notes, text)

    def read_document(self) -> None:
        """
        Read the tokens that the cache lacks into it.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cache keeps the tokens that were read.
        """
        seconds = self._transcript.read()
        if seconds is not None:
            self.remark(f"document read in {seconds:.1f} s")

    def show_last_turn(self) -> None:
        """Remark the last question and answer, or the end of the document where there are none."""
        token_ids = self._transcript.token_ids
        last = self._last_turn()
        if last is None:
            # No character has more than four tokens.
            end = str(self._tokenizer.decode(token_ids[-4 * _SHOWN_CHARACTERS :], skip_special_tokens=True))
            self.remark(f"it ends: {'[...]' * (len(end) > _SHOWN_CHARACTERS)}{end[-_SHOWN_CHARACTERS:]}")
            return
        self.remark(f"last question: {_shortened(last.question)}\nlast answer: {last.answer}")

    def ask(self, question: str) -> bool:
        """Answer a question; returns whether the answer has any token."""
        transcript = self._transcript
        try:
            new = question_tokens(self._tokenizer, transcript.token_ids, self._document_tokens, question)
        except PromptError as error:
            self.remark(str(error))
            return False
        before, room = len(transcript), transcript.context - len(transcript) - len(new)
        if room < 1:
            self.remark(
                f"The conversation has {before:,} tokens, the question {len(new):,}, and the model's context is "
                f"{transcript.context:,}. /undo takes back the last question. /forget goes back to the document."
            )
            return False
        self._has_warned &= transcript.context - before < FEW_TOKENS
        try:
            is_whole = transcript.answer(new, min(self.settings.max_new_tokens, room), self.settings.temperature)
        except (MemoryError, RuntimeError) as error:
            self.remark(f"{out_of_memory(error)}\nThe question is taken back. /forget goes back to the document.")
            return False
        is_answered = len(transcript) > before
        if is_answered:
            self._turns.append(Turn(before, question))
        self._remark_end(is_whole)
        return is_answered

    def retry(self) -> None:
        """Ask the last question again."""
        if not self._has_turn():
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
        if not self._has_turn():
            return
        question = self._take_back()
        self.remark(f"taken back: {_shortened(question)}")

    def forget(self) -> None:
        """Remove all turns after the document, or after what was loaded where the document's end is not known."""
        self._transcript.shorten(self._start)
        self._turns = [turn for turn in self._turns if turn.start < self._start]
        self.remark(f"back to {self._start:,} tokens")

    def set_system(self, text: str) -> None:
        """Replace the system message at the start of the conversation, and read all tokens again."""
        transcript = self._transcript
        try:
            message = SystemMessage(self._tokenizer)
            old = self._system_tokens
            if old is None:
                old = message.num_tokens(transcript.token_ids, self._is_saved)
            new = message.tokens(text)
        except PromptError as error:
            self.remark(str(error))
            return
        more = len(new) - old
        if len(transcript) + more >= transcript.context:
            self.remark(
                f"The conversation has {len(transcript):,} tokens, would have {more:,} more, and the model's context "
                f"is {transcript.context:,}: the message is not set. Shorten it, or /forget what was said."
            )
            return
        transcript.replace_start(old, new)
        self._turns = [replace(turn, start=turn.start + more) for turn in self._turns]
        self._start += more
        self._system_tokens = len(new)
        self.remark("a system message comes first in the prompt, so the document is read again")
        try:
            self.read_document()
        except KeyboardInterrupt:
            self.remark("the rest is read before the next answer")
        except (MemoryError, RuntimeError) as error:
            self.remark(f"{out_of_memory(error)}\nThe document is read before the next answer.")

    def save(self, name: str, is_forced: bool) -> None:
        """Save the conversation in a file; one that is not a cache is replaced only if `is_forced`."""
        path = Path(os.path.expanduser(name))  # Path.expanduser raises an error for unknown users
        try:
            replaced = replaced_file(path, is_forced, f"/save! {name}")
            size = self._transcript.save(path, self._document_tokens) / 2**20
        except (ValueError, OSError, MemoryError) as error:
            self.remark(str(error))
            return
        where = name if replaced is None else f"{name}, in place of {replaced}"
        self.remark(f"{len(self._transcript):,} tokens, {size:,.1f} MiB, are in {where}")

    def keep(self) -> None:
        """Keep the conversation in the store, if there is one and something is new."""
        self._transcript.keep(self._turns[0].question if self._turns else None)

    def tell(self) -> None:
        """Remark what the cache holds, and how fast the last answer was."""
        transcript = self._transcript
        transcript.compute_last()
        self.remark(repr(transcript.cache))
        if self._weights_text is not None:
            self.remark(self._weights_text)
        self.remark(f"{len(transcript):,} of {transcript.context:,} tokens are taken")
        if transcript.num_missing:
            self.remark(f"{transcript.num_missing:,} of them are read before the next answer")
        if transcript.pace is not None:
            self.remark(f"last answer: {transcript.pace}")

    def _remark_end(self, is_whole: bool) -> None:
        """Remark why an answer ended, unless the model ended it, and warn once of a context that is nearly full."""
        transcript, limit = self._transcript, self.settings.max_new_tokens
        left = transcript.context - len(transcript)
        if not is_whole:
            self.remark("the answer was ended")
        elif transcript.is_ended:
            pass
        elif left < 1:
            self.remark(
                f"ended at the model's context of {transcript.context:,} tokens: /undo takes back the last question, "
                "/forget goes back to the document"
            )
        else:
            self.remark(f"ended at --max-new-tokens {limit}: /set max_new_tokens {2 * limit} allows more")
        if left < FEW_TOKENS and not self._has_warned:
            self.remark(f"{left:,} tokens of context left")
        self._has_warned = left < FEW_TOKENS

    def _has_turn(self) -> bool:
        """Whether the start of the last question is known, perhaps from loaded tokens; remarks why not."""
        if self._turns:
            return True
        last = self._last_turn() if self._is_saved else None
        if last is not None and last.start is not None:
            self._turns = [Turn(last.start, last.question)]
            return True
        is_document = len(self._transcript) == self._document_tokens
        if is_document or (last is None and (self._tokenizer.chat_template or not self._is_saved)):
            self.remark("Nothing was asked yet.")
        else:
            way_out = "/forget goes back to the document." if self._knows_document else "Start anew with --document."
            self.remark(
                "The file does not say where its last question begins, so it is neither taken back nor asked again. "
                f"{way_out}"
            )
        return False

    def _last_turn(self) -> LastTurn | None:
        return last_turn(self._tokenizer, self._transcript.token_ids, self._document_tokens)

    def _take_back(self) -> str:
        """Remove the last question and its answer; returns the question."""
        turn = self._turns.pop()
        self._transcript.shorten(turn.start)
        self._start = min(self._start, turn.start)
        return turn.question


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}[...]"
