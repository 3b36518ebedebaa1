"""Generating answers on a thread of their own, so that their text comes as it is made, and Ctrl-C ends them whole."""

import threading
import time
import weakref
from collections import abc, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache
from transformers.generation import RepetitionPenaltyLogitsProcessor

from ..cache import HybridCache, contents_of
from ..cache_argument import CACHE_ARGUMENT, cache_argument
from ..decode_step import repeats_rows
from ..drafts import PromptLookup
from .choosing import Forming, LogProbabilities, Penalties, Sampling, TokenChoice, generate_arguments
from .forms import tokenizer_of_forms
from .prompts import Asked
from .settings import AnswerSettings, SettingError
from .thinking import Thought, ThoughtLimit, ThoughtTokens, overlap
from .turns import Steps, Turns

if TYPE_CHECKING:
    from llguidance import LLTokenizer

FinishReason = Literal["stop", "length", "context", "interrupted", "tool_calls"]
# Of each answer its next token, and at the end nothing.
_Queue = SimpleQueue[list[int] | None]
# What `generate` prepares for passes in which nothing but tokens and positions follows from those before.
_PLAIN = {"position_ids", "use_cache", "logits_to_keep", CACHE_ARGUMENT}
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
            `max_new_tokens`, "context" where the model's context was full before, "interrupted" by who asked,
            "tool_calls" where the server found calls.
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
    def is_thought_alone(self) -> bool:
        """Whether the answer ended within its thought, so that there is no text."""
        return 0 < self.thinking_tokens == len(self.token_ids)

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

    Attributes:
        turns: of the answers, and of who computes beside them on other threads.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self._model, self._tokenizer = model, tokenizer
        self.turns, self._open = Turns(model), weakref.WeakSet[Any]()
        weakref.finalize(self, _end, self._open, self.turns)

    def closing_at_exit(self, pieces: _Pieces) -> _Pieces:
        """Return a generator of an answer, which is closed, if it is open, before the program ends."""
        self._open.add(pieces)
        return pieces

    def forming(
        self, settings: AnswerSettings, thoughts: Sequence[ThoughtTokens] = (), start: int = 0
    ) -> list[Forming]:
        """Return what holds answers to their form, if they have one; raises `SettingError` where nothing can."""
        if not settings.form:
            return []
        [(name, form)] = settings.form.items()
        if not self._ends:
            raise SettingError(f"{name} needs an end-of-text token: set eos_token_id of the model's generation config.")
        return [Forming(name, form, self.vocabulary(name), thoughts, start)]

    def vocabulary(self, wanted_by: str) -> "LLTokenizer":
        """Return the bytes of all tokens, as llguidance has them; raises `SettingError` where it cannot."""
        try:
            size = self._model.config.get_text_config().vocab_size
            return tokenizer_of_forms(self._tokenizer, size, self._ends)
        except ValueError as error:
            raise SettingError(f"{wanted_by} {error}") from error

    def pieces(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Cache, into: "Generation"
    ) -> abc.Generator[tuple[int, str], None, None]:
        """
        Generate, and yield the texts of the answers to the first question in pieces, each with its answer's number.

        An answer that goes on has a piece for each step, which may be empty, or a `Thought`.

        Closing the iterator, or Ctrl-C, ends the answers after the step at hand; the cache is whole then.

        Args:
            input_ids: `[answers, tokens]`, the prompts.
            attention_mask: the same shape; 0 for padding.
            cache: with the first tokens of the prompts.
            into: what is generated.
        """
        tokens, stopping = _Queue(), threading.Event()

        def put(chosen: list[int]) -> None:
            self.turns.tell(partial(tokens.put, chosen))

        future = self.turns.run(self._steps(input_ids, attention_mask, cache, into, put, stopping))
        future.add_done_callback(lambda _: tokens.put(None))
        try:
            with into.meanwhile(future.done):
                try:
                    yield from _filtered(into, self._words(into, iter(tokens.get, None)))
                finally:
                    stopping.set()
                    _wait_for(future)
        finally:
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
        rows = zip(made.asked, made.token_ids, made.ends, strict=True)
        return [self._answer(made, asked, token_ids[:end]) for asked, token_ids, end in rows]

    def _answer(self, made: "Generation", asked: Asked, token_ids: list[int]) -> Answer:
        counted, together = self.counted(made), len(made.asked)
        reason: FinishReason = "stop"
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

    def counted(self, made: "Generation") -> ThoughtTokens:
        """Return what counts the tokens of an answer's thought."""
        return ThoughtTokens(made.thought, made.most_thinking_tokens, partial(self._decoded, made))

    def _words(self, made: "Generation", tokens: Iterator[list[int]]) -> Iterator[tuple[int, str]]:
        """Yield the texts of answers as words are complete, and nothing where a token completes none."""
        words = [_Words(self._tokenizer, made) for _ in range(made.num_told)]
        for count, row in enumerate(tokens, 1):
            for number, of_answer in enumerate(words):
                if (end := made.ends[number]) is None or count <= end:
                    yield from ((number, text) for text in of_answer.after(row[number]))
        for number, of_answer in enumerate(words):
            yield from ((number, text) for text in of_answer.rest())

    def _steps(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Cache,
        made: "Generation",
        put: Callable[[list[int]], None],
        stopping: threading.Event,
    ) -> Steps:
        """Generate by greedy search with what `generate` prepares for it, as transformers' own loop does."""
        device, start, settings = self._model.device, input_ids.shape[1], made.settings
        counted = [self.counted(made) for _ in input_ids]
        processors: list[LogitsProcessor] = []
        if made.log_probabilities:  # of what the model says, before all that follows
            processors.append(made.log_probabilities)
        if settings.repetition_penalty is not None:
            processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if settings.presence_penalty or settings.frequency_penalty:
            processors.append(Penalties(settings, start))
        processors += (forming := self.forming(settings, counted, start))
        if settings.temperature:
            processors.append(Sampling(settings, made.seeds, device))
        if made.thought:
            processors.append(ThoughtLimit(counted, start))
        if len(input_ids) == 1 and settings.drafts and _repeats_rows(self._model, cache):
            made.drafts = PromptLookup(settings.drafts, forced=forming[0].forced if forming else None)
        token_ids = input_ids.to(device)
        prepared = self._model.generate(  # type: ignore[operator]
            token_ids,
            attention_mask=attention_mask.to(device),
            **cache_argument(cache),
            logits_processor=processors,
            custom_generate=_prepared,
            **generate_arguments(self._model.generation_config, settings) | {"max_new_tokens": made.most_tokens},
        )
        model: Any = self._model
        drafting = made.drafts.drafting(GenerationMixin._sample, model, token_ids, prepared)
        config, processing, _ = map(prepared.pop, ("generation_config", "logits_processor", "stopping_criteria"))
        outputs = model._prefill(token_ids, config, prepared)
        is_plain, positions = _is_plain(model, prepared), prepared.get("position_ids")
        with closing(drafting) if drafting else nullcontext(), model._optimize_model_for_decode():
            while True:
                logits = outputs.logits[:, -1].to(device)
                if processing:
                    logits = processing(token_ids, logits.to(torch.float32, copy=True))
                tokens = logits.max(dim=-1, keepdim=True).indices  # as `argmax`, which is slow with half precision
                chosen = tokens[:, 0].tolist()
                made.add(chosen)
                for row, (answer, of_thought) in enumerate(zip(made.token_ids, counted, strict=True)):
                    of_thought.read(answer)
                    is_long = max(len(answer) - made.most_tokens, of_thought.num_answer - settings.max_new_tokens) >= 0
                    if made.ends[row] is None and (is_long or self._is_ended(made, answer)):
                        made.ends[row] = len(answer)
                put(chosen)
                if stopping.is_set() or None not in made.ends:
                    return
                if processing or not is_plain:
                    token_ids = torch.cat([token_ids, tokens], dim=1)
                if not is_plain:
                    prepared = model._update_model_kwargs_for_generation(outputs, prepared)
                elif positions is not None:
                    positions = positions[..., -1:] + 1
                inputs: dict[str, Any] = {}
                if drafting and drafting.take(chosen[0]):
                    pass  # its logits are there
                elif is_plain:
                    inputs = {"input_ids": tokens, "position_ids": positions, **cache_argument(cache)}
                else:
                    inputs = model.prepare_inputs_for_generation(token_ids, next_sequence_length=1, **prepared)
                outputs = (yield from drafting.steps(inputs)) if drafting else (yield inputs)[0]


class Generation:
    """
    Questions that are answered together, the tokens of their answers so far, and when these came.

    Args:
        asked: the questions.
        settings: of their answers.
        answers: to each question; the seed of each is one more than that of the one before.
        top_logprobs: tokens whose log-probabilities are noted at each place beside the chosen one's; `None` for none,
            and not that one's.
        meanwhile: what is entered while they are generated; it is given what says whether they are.

    Attributes:
        asked: the question of each answer.
        settings: of their answers, which are no longer than the context has room for.
        wanted_tokens: of an answer at most, as the settings had it.
        thought: form of their thoughts; `None` for none.
        most_thinking_tokens: of a thought, so that the context has room for the answer after it.
        most_tokens: of a thought and an answer.
        seeds: of each answer; `None` for any.
        num_told: answers to the first question, whose texts are told.
        token_ids: of each answer, and tokens after its end where others are longer.
        ends: of each answer, its number of tokens; `None` before its end, and where somebody has ended all.
        log_probabilities: notes those of the next tokens, or nothing.
        choices: of each answer, its tokens with their log-probabilities, if these are noted.
        start: when they were asked, as `time.perf_counter`.
        first: when the first tokens came; `None` before.
        last: when the last ones came.
        is_whole: whether nobody ended it before its end.
        drafts: what drafts the only answer, or nothing.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        settings: AnswerSettings,
        answers: int = 1,
        top_logprobs: int | None = None,
        meanwhile: Callable[[Callable[[], bool]], AbstractContextManager[object]] = nullcontext,
    ):
        room, self.wanted_tokens = min(each.room for each in asked), settings.max_new_tokens
        self.asked, self.num_told = [each for each in asked for _ in range(answers)], answers
        self.seeds = [
            None if settings.seed is None else (settings.seed + i) % 2**64 for _ in asked for i in range(answers)
        ]
        self.settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        self.thought, self.most_thinking_tokens = asked[0].thought, 0
        self.most_tokens = self.settings.max_new_tokens
        if self.thought:
            marks = self.thought.mark_tokens
            most = 0 if settings.thinking is False else settings.max_thinking_tokens
            self.most_thinking_tokens = max(0, min(most, room - self.most_tokens - marks))
            self.most_tokens = min(room, self.most_tokens + self.most_thinking_tokens + marks)
        self.token_ids: list[list[int]] = [[] for _ in self.asked]
        self.ends: list[int | None] = [None for _ in self.asked]
        self.log_probabilities = None if top_logprobs is None else LogProbabilities(top_logprobs)
        self.choices: list[list[TokenChoice]] = [[] for _ in self.asked]
        self.start = self.last = time.perf_counter()
        self.first: float | None = None
        self.is_whole = False
        self.drafts, self.meanwhile = PromptLookup(0), meanwhile

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next token of each answer, with its log-probability if that is noted and the answer goes on."""
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        for row, token in zip(self.token_ids, tokens, strict=True):
            row.append(token)
        noted = self.log_probabilities.of(tokens) if self.log_probabilities else []
        for choices, choice, end in zip(self.choices, noted, self.ends, strict=False):
            if end is None:
                choices.append(choice)


class _Words(TextStreamer):
    """Yields whole words of one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, made: Generation):
        super().__init__(tokenizer, skip_special_tokens=made.thought is None)
        self._hidden, self._ready = made.thought.hidden_ids if made.thought else (), list[str]()

    def after(self, token: int) -> list[str]:
        """Return what is ready after a token: nothing, and then a text if there is one."""
        if token not in self._hidden:
            self.put(torch.tensor([token]))
        return ["", *self._taken()]

    def rest(self) -> list[str]:
        """Return what is left at the end."""
        self.end()
        return self._taken()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._ready.append(text)

    def _taken(self) -> list[str]:
        ready, self._ready = self._ready, []
        return ready


def _filtered(made: Generation, pieces: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield pieces of several answers, each up to its end, and without the marks of thoughts."""
    waiting = [deque[str | None]() for _ in range(made.num_told)]
    texts = [iter(each.popleft, None) for each in waiting]
    answers = [made.thought.parts(each) for each in texts] if made.thought else texts
    filters = [_before(made.settings.stop, each) for each in answers]
    for number, piece in pieces:
        waiting[number].append(piece)
        while waiting[number]:
            yield number, next(filters[number])
    for number, rest in enumerate(filters):
        waiting[number].append(None)
        yield from ((number, piece) for piece in rest)


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


def _prepared(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> dict[str, Any]:
    """Return what `generate` has prepared for a decoding loop."""
    return prepared


def _is_plain(model: Any, prepared: dict[str, Any]) -> bool:
    """Return whether the arguments of a step are tokens and their positions: no class of a model has others."""
    methods = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    is_own = any(getattr(type(model), each) is not getattr(GenerationMixin, each) for each in methods)
    given = {name for name, value in prepared.items() if value is not None}
    return not is_own and not model.is_remote_code() and given <= _PLAIN


def _end(answers: "weakref.WeakSet[Any]", turns: Turns) -> None:
    """End what is generated, and the thread that does it."""
    for answer in list(answers):
        answer.close()
    turns.end()


def _wait_for(future: "Future[Any]") -> None:
    """Wait for work that ends by itself soon, whatever Ctrl-C says."""
    while not future.done():
        try:
            wait([future])
        except KeyboardInterrupt:
            continue
