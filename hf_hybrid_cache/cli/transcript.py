"""The tokens of a conversation, and the cache that holds them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..layers import IncompleteCacheError
from .finish_reason import is_end
from .interrupts import heeded
from .prompts import context_length
from .sampling import Sampling
from .shown_run import shown_run
from .terminal import TokenStream


class Pace:
    """When the tokens of an answer came."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._num_tokens = 0

    def take(self) -> None:
        """A token has come."""
        self._last = time.perf_counter()
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first = self._last

    def __str__(self) -> str:
        said = f"first token after {self._first - self._start:.2f} s"
        if self._last == self._first:
            return said
        return f"{said}, {(self._num_tokens - 1) / (self._last - self._first):.1f} tokens/s after it"


class Transcript:
    """
    Tokens that were read and said, of which the cache holds the first ones.

    Args:
        model: answers.
        tokenizer: of the model.
        cache: empty, or with the first of the tokens.
        token_ids: of the document, or of a conversation about it.
        prefill_chunk_size: tokens of a prompt per forward pass.
        out: where answers go.
        notes: where a bar is shown.

    Attributes:
        longest: tokens that the model can attend to.
        pace: of the last answer.
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
        self.longest = context_length(model)
        self.pace: Pace | None = None
        self._model, self._tokenizer, self._chunk = model, tokenizer, prefill_chunk_size
        self._out, self._notes = out, notes

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """How many of the tokens the cache does not hold yet."""
        return len(self) - self.cache.get_seq_length()

    @property
    def is_ended(self) -> bool:
        """Whether the last token is one with which an answer ends itself."""
        return is_end(self._model, self.token_ids[-1])

    def read(self) -> float | None:
        """
        Compute what is not in the cache yet; the seconds it took, if there was anything.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was computed is in the cache.
        """
        if self.num_missing < 2:
            return None
        start = time.perf_counter()
        with self._whole_afterwards(), heeded():
            shown_run(self._notes, "document", self._model, torch.tensor([self.token_ids]), self.cache, 1, self._chunk)
        return time.perf_counter() - start

    def answer(self, question: list[int], max_new_tokens: int, temperature: float) -> bool:
        """
        Add a question and an answer; whether nobody ended it.

        Where no token of an answer came, it is as if nothing had been asked.
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
            with self._whole_afterwards(), heeded():
                shown_run(
                    self._notes,
                    "question",
                    self._model,
                    prompt,
                    self.cache,
                    max_new_tokens,
                    self._chunk,
                    on_token,
                    Sampling(temperature),
                )
        except KeyboardInterrupt:
            is_whole = False
        stream.end()
        if len(self) == asked:
            self.shorten(before)
        else:
            self.pace = pace
        return is_whole

    def shorten(self, num_tokens: int) -> None:
        """Go back to so many tokens; some caches cannot, and compute them again."""
        del self.token_ids[num_tokens:]
        surplus = -self.num_missing
        if surplus > 0 and self.cache.is_croppable:
            self.cache.crop(-surplus)
        elif surplus > 0:
            self.cache.reset()

    def replace_start(self, num_tokens: int, new: list[int]) -> None:
        """Put `new` in the place of the first tokens; all are to be computed again."""
        self.token_ids[:num_tokens] = new
        self.cache.reset()

    def compute_last(self) -> None:
        """Compute the last token of an answer, which would be computed with the next question."""
        if self.num_missing == 1:
            new = torch.tensor([self.token_ids[-1:]], device=self._model.device)
            with torch.inference_mode():
                self._model(new, **cache_argument(self.cache))

    def save(self, path: Path) -> int:
        """
        Keep everything in a file; its bytes.

        Raises:
            CacheFileError: it cannot be written.
        """
        self.compute_last()
        self.cache.save(path, torch.tensor([self.token_ids]))
        return path.stat().st_size

    @contextmanager
    def _whole_afterwards(self) -> Iterator[None]:
        """After an interrupt let the cache hold what all of its layers hold, or nothing."""
        try:
            yield
        except KeyboardInterrupt:
            try:
                self.cache.drop_unfinished()
            except IncompleteCacheError:
                self.cache.reset()
            raise
