"""Generating answers on a thread of their own, so that their text comes as it is made, and Ctrl-C ends them whole."""

import threading
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache

from ..cache import HybridCache, contents_of
from ..cache_argument import cache_argument
from ..decode_step import repeats_rows
from ..drafts import PromptLookup
from .choosing import Forming, Penalties, Sampling, generate_arguments
from .forms import tokenizer_of_forms
from .prompts import Asked
from .settings import AnswerSettings, SettingError
from .thinking import Thought, ThoughtLimit, ThoughtTokens, overlap

FinishReason = Literal["stop", "length", "context", "interrupted"]
_Job = tuple[Callable[[], None], "Future[None]"]
_Pieces = TypeVar("_Pieces", bound=abc.Generator[Any, None, None])


@dataclass(frozen=True)
class Answer:
    """
    An answer, and what it took.

    Attributes:
        question: its text.
        text: of the answer, without its thought, special tokens and what ended it.
        thinking: the thought before it; empty for none.
        thinking_tokens: those of the thought, with its marks.
        token_ids: of the thought and the answer, with what ended it.
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
    thinking: str = ""
    thinking_tokens: int = 0

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

    def forming(
        self, settings: AnswerSettings, thoughts: Sequence[ThoughtTokens] = (), start: int = 0
    ) -> list[LogitsProcessor]:
        """Return what holds answers to their form, if they have one; raises `SettingError` where nothing can."""
        if not settings.form:
            return []
        [(name, form)] = settings.form.items()
        try:
            vocabulary = self._model.config.get_text_config().vocab_size
            tokenizer = tokenizer_of_forms(self._tokenizer, vocabulary, self._ends)
        except ValueError as error:
            raise SettingError(f"{name} {error}") from error
        return [Forming(name, form, tokenizer, thoughts, start)]

    def pieces(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Cache, into: "Generation"
    ) -> abc.Generator[str, None, None]:
        """
        Generate, and yield the text of the first answer, in a piece for each step, which may be empty, or a `Thought`.

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
        texts = iter(pieces.get, None)

        def generate() -> None:
            try:
                self._generate(input_ids, attention_mask, cache, into, streamer, stopping)
            finally:
                pieces.put(None)

        future = Future[None]()
        self._jobs.put((generate, future))
        try:
            yield from _before(into.settings.stop, into.thought.parts(texts) if into.thought else texts)
        finally:
            stopping.set()
            _wait_for(future)
            if isinstance(cache, HybridCache) and future.exception() is None:
                cache.note_tokens(torch.cat([input_ids.cpu(), torch.tensor(into.token_ids, dtype=torch.long)], dim=1))
        future.result()
        into.is_whole = True

    def texts(self, made: "Generation", token_ids: list[int]) -> tuple[str, str]:
        """Return the thought of an answer, and the text after it, up to the first of the texts that end one."""
        thought, text = self._parts(made, token_ids)
        return thought, text[: _end_of(text, made.settings.stop)]

    def answers(self, made: "Generation") -> list[Answer]:
        """Return the answers that were generated, with all that is known of them."""
        return [self._answer(made, asked, row) for asked, row in zip(made.asked, made.token_ids, strict=True)]

    def _answer(self, made: "Generation", asked: Asked, token_ids: list[int]) -> Answer:
        counted, together = self._counted(made), len(made.asked)
        reason: FinishReason = "stop"
        if together > 1:  # without the tokens that follow its end where others are longer
            starts = (token_ids[:length] for length in range(1, len(token_ids)))
            token_ids = next((each for each in starts if self._is_whole(made, counted, each)), token_ids)
        counted.read(token_ids)
        if not made.is_whole:
            reason = "interrupted"
        elif not self._is_ended(made, token_ids):
            is_full = len(token_ids) >= asked.room and counted.num_answer < made.wanted_tokens
            reason = "context" if is_full else "length"
        thought, text = self.texts(made, token_ids)
        return Answer(
            question=asked.question,
            text=text.strip(),
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=len(asked.token_ids),
            first_token_seconds=(made.first or made.last) - made.start,
            seconds=made.last - made.start,
            together=together,
            drafted_tokens=made.drafts.drafted_tokens,
            accepted_tokens=made.drafts.accepted_tokens,
            thinking=thought,
            thinking_tokens=counted.num_thought,
        )

    def _is_ended(self, made: "Generation", token_ids: list[int]) -> bool:
        """Return whether an answer ends with an end-of-text token of the model, or has one of the texts that end it."""
        if token_ids[-1] in self._ends:
            return True
        return self._has_stop(made, token_ids)

    @property
    def _ends(self) -> tuple[int, ...]:
        """The end-of-text tokens of the model."""
        ends = getattr(self._model.generation_config, "eos_token_id", None)
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    def _has_stop(self, made: "Generation", token_ids: list[int]) -> bool:
        stop = made.settings.stop
        return bool(stop) and _end_of(self._parts(made, token_ids)[1], stop) is not None

    def _is_whole(self, made: "Generation", counted: ThoughtTokens, token_ids: list[int]) -> bool:
        """Return whether an answer has ended, or is as long as it may be after its thought."""
        counted.read(token_ids)
        return counted.num_answer >= made.settings.max_new_tokens or self._is_ended(made, token_ids)

    def _parts(self, made: "Generation", token_ids: list[int]) -> tuple[str, str]:
        """Return the thought of an answer, and all text after it."""
        text = self._decoded(made, token_ids)
        pieces = list(made.thought.parts([text])) if made.thought else [text]
        thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
        return thought, "".join(piece for piece in pieces if not isinstance(piece, Thought))

    def _decoded(self, made: "Generation", token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones, but for the marks of thoughts."""
        if made.thought is None:
            return str(self._tokenizer.decode([*token_ids], skip_special_tokens=True))
        return str(self._tokenizer.decode([each for each in token_ids if each not in made.thought.hidden_ids]))

    def _counted(self, made: "Generation") -> ThoughtTokens:
        return ThoughtTokens(made.thought, made.most_thinking_tokens, partial(self._decoded, made))

    def _generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Cache,
        made: "Generation",
        streamer: "_Streamer",
        stopping: threading.Event,
    ) -> None:
        device, start, settings = self._model.device, input_ids.shape[1], made.settings
        counted = [self._counted(made) for _ in input_ids]

        def is_ended(counted: ThoughtTokens, token_ids: list[int]) -> bool:
            counted.read(token_ids)
            return counted.num_answer >= settings.max_new_tokens or self._has_stop(made, token_ids)

        def are_ended(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            # transformers' own criterion of stop strings reads the whole vocabulary, and knows only some tokenizers.
            ended = [stopping.is_set()] * len(token_ids)
            if settings.stop or made.thought:
                rows = zip(counted, token_ids[:, start:].tolist(), strict=True)
                ended = [stopping.is_set() or is_ended(each, row) for each, row in rows]
            return torch.tensor(ended, device=token_ids.device)

        processors: list[LogitsProcessor] = []
        if settings.presence_penalty or settings.frequency_penalty:
            processors.append(Penalties(settings, start))
        processors += self.forming(settings, counted, start)
        if settings.temperature:
            processors.append(Sampling(settings, len(input_ids), device))
        if made.thought:
            processors.append(ThoughtLimit(counted, start))
        if len(input_ids) == 1 and settings.drafts and _repeats_rows(self._model, cache):
            made.drafts = PromptLookup(settings.drafts)
        self._model.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            **cache_argument(cache),
            streamer=streamer,
            stopping_criteria=[are_ended],
            logits_processor=processors,
            custom_generate=made.drafts,
            **generate_arguments(self._model.generation_config, settings) | {"max_new_tokens": made.most_tokens},
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
        wanted_tokens: of an answer at most, as the settings had it.
        thought: form of their thoughts; `None` for none.
        most_thinking_tokens: of a thought, so that the context has room for the answer after it.
        most_tokens: of a thought and an answer.
        token_ids: of each answer.
        start: when they were asked, as `time.perf_counter`.
        first: when the first tokens came; `None` before.
        last: when the last ones came.
        is_whole: whether nobody ended it before its end.
        drafts: what drafts the only answer, or nothing.
    """

    def __init__(self, asked: Sequence[Asked], settings: AnswerSettings):
        room, self.wanted_tokens = min(each.room for each in asked), settings.max_new_tokens
        self.asked, self.settings = asked, replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        self.thought, self.most_thinking_tokens = asked[0].thought, 0
        self.most_tokens = self.settings.max_new_tokens
        if self.thought:
            marks = self.thought.mark_tokens
            most = 0 if settings.thinking is False else settings.max_thinking_tokens
            self.most_thinking_tokens = max(0, min(most, room - self.most_tokens - marks))
            self.most_tokens = min(room, self.most_tokens + self.most_thinking_tokens + marks)
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
        super().__init__(tokenizer, skip_special_tokens=made.thought is None)
        self._made, self._pieces, self._is_prompt = made, pieces, True
        self._hidden = made.thought.hidden_ids if made.thought else ()

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._made.add(value.tolist())
            self._pieces.put("")
            if int(value[0]) not in self._hidden:
                super().put(value[:1])
        self._is_prompt = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._pieces.put(text)


def _before(stop: Sequence[str], pieces: Iterator[str]) -> Iterator[str]:
    """Yield pieces of an answer up to the first of the texts that end it; what may begin one of these waits."""
    held, is_ended = "", False
    for piece in pieces:
        if isinstance(piece, Thought):
            yield piece
            continue
        held += "" if is_ended else piece
        if (end := _end_of(held, stop)) is not None:
            held, is_ended = held[:end], True
        waiting = 0 if is_ended else max((overlap(held, each) for each in stop), default=0)
        ready, held = held[: len(held) - waiting], held[len(held) - waiting :]
        yield ready
    yield held


def _end_of(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the texts that end an answer begins in its text; `None` if it has none of them."""
    return min((text.index(each) for each in stop if each in text), default=None)


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
