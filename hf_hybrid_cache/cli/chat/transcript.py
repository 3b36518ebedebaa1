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
from ...layers import IncompleteCacheError
from ..interrupts import allowing_interrupts
from ..runs.answer_options import AnswerOptions
from ..runs.finish_reason import is_end
from ..runs.going_back import can_go_back
from ..runs.prompts import context_length
from ..runs.sampling import Sampling
from ..runs.shown_run import shown_run
from ..terminal import TokenStream


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
    ):
        self.token_ids, self.cache = token_ids, cache
        self.context = context_length(model)
        self.pace: Pace | None = None
        self._model, self._tokenizer, self._chunk = model, tokenizer, prefill_chunk_size
        self._out, self._notes = out, notes

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
            prompt = torch.tensor([self.token_ids])
            options = AnswerOptions(1, prefill_chunk_size=self._chunk)
            shown_run(self._notes, "document", self._model, prompt, self.cache, options)
        return time.perf_counter() - start

    def answer(self, question: list[int], max_new_tokens: int, temperature: float) -> bool:
        """
        Add a question and generate its answer; an answer without any token removes the question again.

        Returns:
            Whether Ctrl-C did not end the answer.
        """
        before = len(self)
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
                options = AnswerOptions(max_new_tokens, Sampling(temperature), self._chunk)
                shown_run(self._notes, "question", self._model, prompt, self.cache, options, on_token)
        except KeyboardInterrupt:
            is_whole = False
        stream.end()
        if len(self) == asked:
            self.shorten(before)
        else:
            self.pace = pace
        return is_whole

    def shorten(self, num_tokens: int) -> None:
        """Remove all tokens after the first `num_tokens`; a cache that cannot be cropped must read these again."""
        del self.token_ids[num_tokens:]
        surplus = -self.num_missing
        if surplus > 0 and can_go_back(self.cache):
            self.cache.crop(-surplus)
        elif surplus > 0:
            self.cache.reset()

    def replace_start(self, num_tokens: int, new: list[int]) -> None:
        """Replace the first `num_tokens` tokens by `new`; the cache must read all tokens again."""
        self.token_ids[:num_tokens] = new
        self.cache.reset()

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

    @contextmanager
    def _whole_afterwards(self) -> Iterator[None]:
        """After an interrupt remove the tokens that only some layers hold, or all tokens."""
        try:
            yield
        except KeyboardInterrupt:
            try:
                self.cache.drop_unfinished()
            except IncompleteCacheError:
                self.cache.reset()
            raise
