"""Generating answers on a thread of their own, so that their text comes as it is made, and Ctrl-C ends them whole."""

import threading
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache

from ..cache import HybridCache, contents_of
from ..cache_argument import cache_argument
from ..decode_step import repeats_rows
from ..drafts import PromptLookup
from .choosing import Penalties, Sampling, generate_arguments
from .prompts import Asked
from .settings import AnswerSettings

FinishReason = Literal["stop", "length", "context", "interrupted"]
_Job = tuple[Callable[[], None], "Future[None]"]
_Pieces = TypeVar("_Pieces", bound=abc.Generator[Any, None, None])


@dataclass(frozen=True)
class Answer:
    """
    An answer, and what it took.

    Attributes:
        question: its text.
        text: of the answer, without special tokens and what ended it.
        token_ids: of the answer, with what ended it.
        finish_reason: "stop" after an end-of-text token or a text of `AnswerSettings.stop`, "length" after
            `max_new_tokens`, "context" where the model's context was full before, "interrupted" by who asked.
        prompt_tokens: tokens before the answer, those of the question among them.
        first_token_seconds: from the question to the first token, with documents that were read meanwhile.
        seconds: from the question to the last token, of all answers that were generated together.
        together: how many answers that were.
        drafted_tokens: that were checked before they were generated, see `PromptLookup`.
        accepted_tokens: of them, that were generated.
    """

    question: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    first_token_seconds: float
    seconds: float
    together: int = 1
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second after the first one; `None` for an answer of one token."""
        after_first = self.seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / after_first if len(self.token_ids) > 1 and after_first > 0 else None


class Generator:
    """
    Generates answers with one model, on one thread.

    Args:
        model: of any decoder architecture.
        tokenizer: of the model.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self._model, self._tokenizer = model, tokenizer
        self._jobs, self._open = SimpleQueue[_Job | None](), weakref.WeakSet[Any]()
        # One thread for all answers, because libraries keep threads of their own for each. At the end of the program
        # it must not be at work.
        threading.Thread(target=_work, args=(self._jobs,), name="answers", daemon=True).start()
        weakref.finalize(self, _end, self._open, self._jobs)

    def closing_at_exit(self, pieces: _Pieces) -> _Pieces:
        """Return a generator of an answer, which is closed, if it is open, before the program ends."""
        self._open.add(pieces)
        return pieces

    def pieces(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Cache, into: "Generation"
    ) -> abc.Generator[str, None, None]:
        """
        Generate, and yield the text of the first answer, in a piece for each step, which may be empty.

        Closing the iterator, or Ctrl-C, ends the answers after the step at hand; the cache is whole then.

        Args:
            input_ids: `[answers, tokens]`, the prompts.
            attention_mask: the same shape; 0 for padding.
            cache: with the first tokens of the prompts.
            into: what is generated.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        stopping = threading.Event()
        streamer = _Streamer(self._tokenizer, pieces, into)

        def generate() -> None:
            try:
                self._generate(input_ids, attention_mask, cache, into, streamer, stopping)
            finally:
                pieces.put(None)

        future = Future[None]()
        self._jobs.put((generate, future))
        try:
            yield from _before(into.settings.stop, iter(pieces.get, None))
        finally:
            stopping.set()
            _wait_for(future)
            if isinstance(cache, HybridCache) and future.exception() is None:
                cache.note_tokens(torch.cat([input_ids.cpu(), torch.tensor(into.token_ids, dtype=torch.long)], dim=1))
        future.result()
        into.is_whole = True

    def text(self, token_ids: list[int], stop: Sequence[str]) -> str:
        """Return the text of an answer, up to the first of the texts that end one."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        return text[: _end_of(text, stop)]

    def answers(self, made: "Generation") -> list[Answer]:
        """Return the answers that were generated, with all that is known of them."""
        return [self._answer(made, asked, row) for asked, row in zip(made.asked, made.token_ids, strict=True)]

    def _answer(self, made: "Generation", asked: Asked, token_ids: list[int]) -> Answer:
        stop, together = made.settings.stop, len(made.asked)
        reason: FinishReason = "stop"
        if together > 1:
            token_ids = self.until_end(token_ids, stop)
        if not made.is_whole:
            reason = "interrupted"
        elif not self.is_ended(token_ids, stop):
            reason = "context" if len(token_ids) >= asked.room else "length"
        return Answer(
            question=asked.question,
            text=self.text(token_ids, stop).strip(),
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=len(asked.token_ids),
            first_token_seconds=(made.first or made.last) - made.start,
            seconds=made.last - made.start,
            together=together,
            drafted_tokens=made.drafts.drafted_tokens,
            accepted_tokens=made.drafts.accepted_tokens,
        )

    def is_ended(self, token_ids: list[int], stop: Sequence[str]) -> bool:
        """Return whether an answer ends with an end-of-text token of the model, or has one of the texts that end it."""
        ends = getattr(self._model.generation_config, "eos_token_id", None)
        if token_ids[-1] in ([] if ends is None else [ends] if isinstance(ends, int) else ends):
            return True
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True)) if stop else ""
        return _end_of(text, stop) is not None

    def until_end(self, token_ids: list[int], stop: Sequence[str]) -> list[int]:
        """Return the tokens of an answer without those that follow its end where others are longer."""
        lengths = range(1, len(token_ids))
        return token_ids[: next((n for n in lengths if self.is_ended(token_ids[:n], stop)), len(token_ids))]

    def _generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Cache,
        into: "Generation",
        streamer: "_Streamer",
        stopping: threading.Event,
    ) -> None:
        device, start, settings = self._model.device, input_ids.shape[1], into.settings

        def are_ended(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            # transformers' own criterion of stop strings reads the whole vocabulary, and knows only some tokenizers.
            rows = token_ids[:, start:].tolist() if settings.stop else [[]] * len(token_ids)
            texts = [str(self._tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
            ended = [stopping.is_set() or _end_of(text, settings.stop) is not None for text in texts]
            return torch.tensor(ended, device=token_ids.device)

        processors: list[LogitsProcessor] = []
        if settings.presence_penalty or settings.frequency_penalty:
            processors.append(Penalties(settings, start))
        if settings.temperature:
            processors.append(Sampling(settings, len(input_ids), device))
        if len(input_ids) == 1 and settings.drafts and _repeats_rows(self._model, cache):
            into.drafts = PromptLookup(settings.drafts)
        self._model.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            **cache_argument(cache),
            streamer=streamer,
            stopping_criteria=[are_ended],
            logits_processor=processors,
            custom_generate=into.drafts,
            **generate_arguments(self._model.generation_config, settings),
        )


class Generation:
    """
    Questions that are answered together, the tokens of their answers so far, and when these came.

    Args:
        asked: the questions.
        settings: of their answers.

    Attributes:
        asked: the questions.
        settings: of their answers, which are no longer than the context has room for.
        token_ids: of each answer.
        start: when they were asked, as `time.perf_counter`.
        first: when the first tokens came; `None` before.
        last: when the last ones came.
        is_whole: whether nobody ended it before its end.
        drafts: what drafts the only answer, or nothing.
    """

    def __init__(self, asked: Sequence[Asked], settings: AnswerSettings):
        room = min(each.room for each in asked)
        self.asked, self.settings = asked, replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        self.token_ids: list[list[int]] = [[] for _ in asked]
        self.start = self.last = time.perf_counter()
        self.first: float | None = None
        self.is_whole = False
        self.drafts = PromptLookup(0)

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next token of each answer."""
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        for row, token in zip(self.token_ids, tokens, strict=True):
            row.append(token)


class _Streamer(TextStreamer):
    """Takes tokens from `generate`, after the prompts, which come first; puts whole words of the first answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pieces: "SimpleQueue[str | None]", made: Generation):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._made, self._pieces, self._is_prompt = made, pieces, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._made.add(value.tolist())
            self._pieces.put("")
            super().put(value[:1])
        self._is_prompt = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._pieces.put(text)


def _before(stop: Sequence[str], pieces: Iterator[str]) -> Iterator[str]:
    """Yield pieces of a text up to the first of the texts that end it; what may begin one of these waits."""
    held, is_ended = "", False
    for piece in pieces:
        held += "" if is_ended else piece
        if (end := _end_of(held, stop)) is not None:
            held, is_ended = held[:end], True
        waiting = 0 if is_ended else max((_overlap(held, each) for each in stop), default=0)
        ready, held = held[: len(held) - waiting], held[len(held) - waiting :]
        yield ready
    yield held


def _end_of(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the texts that end an answer begins in its text; `None` if it has none of them."""
    return min((text.index(each) for each in stop if each in text), default=None)


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of a text begin another one."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


def _repeats_rows(model: PreTrainedModel, cache: Cache) -> bool:
    """Return whether drafts change no answer: a token has the same bits in a pass of several, as far as kernels run."""
    if not isinstance(cache, HybridCache):
        return False
    return all(layer.store_in_place() is not None for layer in contents_of(cache).ours) and repeats_rows(model)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    """Do jobs, one after the other, until there is none."""
    while (job := jobs.get()) is not None:
        act, future = job
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
        del job, act, future  # with what they hold


def _end(answers: "weakref.WeakSet[Any]", jobs: "SimpleQueue[_Job | None]") -> None:
    """End what is generated, and the thread that does it."""
    for answer in list(answers):
        answer.close()
    jobs.put(None)


def _wait_for(future: "Future[Any]") -> None:
    """Wait for work that ends by itself soon, whatever Ctrl-C says."""
    while not future.done():
        try:
            wait([future])
        except KeyboardInterrupt:
            continue
