"""The tokens of a conversation, and their cache."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache import HybridCache
from ...cache_argument import cache_argument
from ...layers import IncompleteCacheError, NoCheckpointError
from ..interrupts import allowing_interrupts
from ..runs.answer_options import AnswerOptions
from ..runs.finish_reason import is_end
from ..runs.prompts import context_length
from ..runs.sampling import Sampling
from ..runs.shown_run import shown_run
from ..terminal import TokenStream
from .kept_conversation import KeptConversation

# Checkpoints that are kept: that of the document, and those before the last questions.
_MOST_CHECKPOINTS = 4


class Pace:
    """Measures when the tokens of an answer come."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._num_tokens = 0

    def take(self) -> None:
        """Note that a token has come."""
        self._last = time.perf_counter()
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first = self._last

    def __str__(self) -> str:
        text = f"first token after {self._first - self._start:.2f} s"
        if self._last == self._first:
            return text
        return f"{text}, {(self._num_tokens - 1) / (self._last - self._first):.1f} tokens/s after it"


class Transcript:
    """
    All tokens of a conversation; the cache holds the first of them.

    Args:
        model: answers.
        tokenizer: of the model.
        cache: empty, or with the first of the tokens.
        token_ids: of the document, or of a conversation about it.
        prefill_chunk_size: tokens of a prompt in each forward pass.
        out: receives answers.
        notes: shows a bar, on a terminal.
        kept: keeps the conversation in a store; `None` for no store.

    Attributes:
        context: tokens that the model can attend to.
        pace: the speed of the last answer; `None` before it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: HybridCache,
        token_ids: list[int],
        prefill_chunk_size: int,
        out: Console,
        notes: Console,
        kept: KeptConversation | None = None,
    ):
        self.token_ids, self.cache = token_ids, cache
        self.context = context_length(model)
        self.pace: Pace | None = None
        self._model, self._tokenizer, self._chunk = model, tokenizer, prefill_chunk_size
        self._out, self._notes, self._kept = out, notes, kept

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens that the cache does not hold yet."""
        return len(self) - self.cache.get_seq_length()

    @property
    def is_ended(self) -> bool:
        """Whether the last token is an end-of-text token."""
        return is_end(self._model, self.token_ids[-1])

    def read(self) -> float | None:
        """
        Read the tokens that the cache lacks into it.

        Returns:
            The seconds that it took; `None` where the cache lacked none.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cache keeps the tokens that were read.
        """
        if self.num_missing < 2:
            return None
        start = time.perf_counter()
        with self._whole_afterwards(), allowing_interrupts():
            self._read_document()
            if self.num_missing > 1:
                prompt = torch.tensor([self.token_ids])
                options = AnswerOptions(1, prefill_chunk_size=self._chunk)
                shown_run(self._notes, "document", self._model, prompt, self.cache, options)
        return time.perf_counter() - start

    def answer(self, question: list[int], max_new_tokens: int, temperature: float) -> bool:
        """
        Add a question and generate its answer; an answer without any token removes the question again.

        Returns:
            Whether Ctrl-C did not end the answer.

        Raises:
            MemoryError, RuntimeError: memory ends; the question is removed again.
        """
        before = len(self)
        self._keep_checkpoint()
        self.token_ids += question
        asked = len(self)
        stream, pace = TokenStream(self._out, self._tokenizer), Pace()

        def on_token(token: int) -> None:
            self.token_ids.append(token)
            pace.take()
            stream.put(token)

        prompt, is_whole = torch.tensor([self.token_ids]), True
        try:
            with self._whole_afterwards(), allowing_interrupts():
                self._read_document()
                options = AnswerOptions(max_new_tokens, Sampling(temperature), self._chunk)
                shown_run(self._notes, "question", self._model, prompt, self.cache, options, on_token)
        except KeyboardInterrupt:
            is_whole = False
        except BaseException:
            self.shorten(before)
            raise
        finally:
            stream.end()
        if len(self) == asked:
            self.shorten(before)
        else:
            self.pace = pace
        return is_whole

    def shorten(self, num_tokens: int) -> None:
        """Remove all tokens after the first `num_tokens`; what a cache has forgotten is read again."""
        del self.token_ids[num_tokens:]
        if self.num_missing < 0:
            try:
                self.cache.go_back(num_tokens)
            except NoCheckpointError:
                self.cache.reset()

    def replace_start(self, num_tokens: int, new: list[int]) -> None:
        """Replace the first `num_tokens` tokens by `new`; the cache must read all tokens again."""
        self.token_ids[:num_tokens] = new
        self.cache.reset()
        if self._kept is not None:
            self._kept.document_tokens += len(new) - num_tokens

    def compute_last(self) -> None:
        """Read the last token of an answer now, instead of with the next question."""
        if self.num_missing == 1:
            new = torch.tensor([self.token_ids[-1:]], device=self._model.device)
            with torch.inference_mode():
                self._model(new, **cache_argument(self.cache))

    def save(self, path: Path, document_tokens: int | None) -> int:
        """
        Save the tokens, how many of them are the document's, and the cache.

        Returns:
            The bytes of the file.

        Raises:
            CacheFileError: the file cannot be written.
        """
        self.compute_last()
        self.cache.save(path, torch.tensor([self.token_ids]), document_tokens)
        return path.stat().st_size

    def _keep_checkpoint(self) -> None:
        """Let the cache go back to what it holds now: the document, or what comes before a question."""
        if self.cache.get_seq_length():
            self.cache.checkpoint()
            for length in self.cache.checkpoints[1 : 1 - _MOST_CHECKPOINTS]:
                self.cache.drop_checkpoint(length)

    def keep(self, first_question: str | None) -> None:
        """Keep the conversation in the store, if there is one; the first question is for its title."""
        if self._kept is not None:
            self._kept.keep(self.token_ids, self.cache, first_question)

    def _read_document(self) -> None:
        """Take the document from the store, if there is one, or read it, where the cache lacks it."""
        if self._kept is not None:
            self.cache = self._kept.filled(self.token_ids, self.cache)

    @contextmanager
    def _whole_afterwards(self) -> Iterator[None]:
        """After an error remove the tokens that only some layers hold, or those after a checkpoint, or all."""
        try:
            yield
        except BaseException:
            try:
                self.cache.drop_unfinished()
            except IncompleteCacheError:
                self._go_back_to_checkpoint()
            raise

    def _go_back_to_checkpoint(self) -> None:
        """Go back to the last checkpoint, or forget all where there is none, or what is stored is not whole."""
        lengths = self.cache.checkpoints
        try:
            if lengths:
                self.cache.go_back(lengths[-1])
                return
        except IncompleteCacheError:
            pass
        self.cache.reset()
