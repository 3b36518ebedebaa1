"""The answers of a server: what the caches in memory hold of a prompt is not read again, nor what a store has of it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from sys import getsizeof
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..chat import (
    Answer,
    AnswerSettings,
    Asked,
    Call,
    CallForm,
    ChatTemplate,
    Conversation,
    Generation,
    Generator,
    PromptError,
    SettingError,
    TrackedCache,
    cache_maker,
    context_length,
    is_out_of_memory,
)
from ..prefix_store import PrefixStore, PrefixStoreError, PrefixStoreFolderError
from ..storage import available_host_bytes
from ..token_ids import num_common
from .logprobs import Piece, Telling
from .protocol import APIError

# A conversation of which so many tokens would be read is looked for in the list of stored prompts.
_SEARCHED = 128
_NOT_READ = "prompts are not kept, and each is read anew"
# Of a token in a list.
_TOKEN_BYTES = getsizeof(2**16) + 8
# Of the host memory that is free once the model is loaded, for caches.
_SHARE = 4


class Answered(NamedTuple):
    """The end of answers: all that is known of them, and how many tokens of the prompt were not computed for them."""

    answers: list[Answer]
    cached_tokens: int


@dataclass(eq=False)
class _Running:
    """
    A request that is answered.

    Attributes:
        token_ids: of its prompt.
        text_bytes: of its texts in memory.
        states: of its tokens.
        reached: tokens of the prompt that are read into the store so far; all of them where nothing more is.
    """

    token_ids: list[int]
    text_bytes: int
    states: TrackedCache
    reached: int = 0


class Engine:
    """
    Answers prompts, each from what was read before, on several threads, in turns.

    A request is tokenized whole. What it begins with is taken from a cache in memory, or from the store. Where another
    one reads that to the store already, it waits.

    Args:
        model: answers.
        tokenizer: of the model.
        store: finds and keeps what is read.
        memory_bytes: of what is in memory of running and earlier conversations, of which those used longest ago go
            first; `None` for a quarter of what is free.
        remark: receives sentences for who runs the server.
        cache: name of the caches, as `Chat` takes it.
        bits: of their keys and values, likewise.
        cpu_decode: of them, likewise.

    Attributes:
        context: tokens of the model's context.
        takes_tools: whether the chat template takes functions that answers may call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        store: PrefixStore,
        *,
        memory_bytes: int | None,
        remark: Callable[[str], None],
        cache: str,
        bits: int | None = None,
        cpu_decode: bool | None = None,
    ):
        self._model, self._store, self._remark = model, store, remark
        self._template, self._generator = ChatTemplate(tokenizer), Generator(model, tokenizer)
        self._turns = self._generator.turns
        self.takes_tools = self._template.calls is not None
        self._make, self.context = cache_maker(cache, model, bits, cpu_decode), context_length(model)
        self._most_characters = self.context * max(map(len, tokenizer.get_vocab()))
        self._details = {"cache": cache, "bits": bits}
        self._memory_bytes = available_host_bytes() // _SHARE if memory_bytes is None else memory_bytes
        # The one used last is the last.
        self._held = list[TrackedCache]()
        self._running = list[_Running]()
        self._failing = set[str]()  # what follows, as it was said

    def answer(
        self,
        prompt: Conversation | str,
        settings: AnswerSettings,
        require_wanted: Callable[[], None],
        answers: int = 1,
        top_logprobs: int | None = None,
    ) -> Iterator[Piece | Answered]:
        """
        Yield the texts of answers in pieces, and their calls, and then what is known of them.

        Args:
            prompt: a conversation, or a text that is used as it is.
            settings: of the answers.
            require_wanted: is called after each step, and pass over a prompt, and raises an error to end the answers.
            answers: to the prompt, which are generated together; see `Generation`.
            top_logprobs: of their tokens, likewise.

        Raises:
            APIError: the prompt does not fit, or memory has ended.
        """
        with self._turns.taken():
            require_wanted()
            try:
                yield from self._answered(prompt, settings, answers, top_logprobs, require_wanted)
            except PromptError as error:
                raise APIError(400, str(error), "invalid_prompt") from error
            except SettingError as error:
                named = (name for name in ("tools", "logprobs") if str(error).startswith(f"{name} "))
                raise APIError(400, str(error), "invalid_value", next(named, "response_format")) from error
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._held.clear()
                message = "Memory has ended, so no conversation is in memory now. Ask again, or with a shorter prompt."
                raise APIError(503, message, "out_of_memory") from error

    def _answered(
        self,
        prompt: Conversation | str,
        settings: AnswerSettings,
        answers: int,
        top_logprobs: int | None,
        require_wanted: Callable[[], None],
    ) -> Iterator[Piece | Answered]:
        template, generator = self._template.given(settings), self._generator
        asked = Conversation(()) if isinstance(prompt, str) else prompt
        calls = self._template.calls if asked.functions else None
        settings = calls.held(settings, asked) if calls else settings
        generator.forming(settings)  # what is refused is refused before anything is read
        parts = (part for _, *parts in asked.messages for part in parts if part)
        texts = [prompt] if isinstance(prompt, str) else [*map(str, (*asked.functions, *parts))]
        if (characters := sum(map(len, texts))) > self._most_characters:  # not even the longest tokens would fit
            raise PromptError(f"The prompt has {characters:,} characters, and the model's context is {self.context:,}.")
        if isinstance(prompt, str):
            (token_ids, shared), thought = template.whole_prompt(prompt), None
        else:
            (token_ids, shared), thought = template.request(prompt.messages, prompt.functions), template.thought
        calls = None if asked.choice == "none" else calls
        thought = calls.after(thought) if calls else thought
        whole = Asked.of("", token_ids, self.context, thought)
        made = Generation([whole], settings, answers, top_logprobs, self._turns.given)
        numbers = range(answers if made.log_probabilities else 0)
        telling = [Telling(made, number, generator) for number in numbers]

        def after_pass(_: int) -> None:
            running.reached = running.states.num_tokens
            if running.reached < len(token_ids) - 1:
                self._make_room()
                self._turns.pause()
            require_wanted()

        *_, worth = self._best_held(token_ids)
        self._wait_for_others(token_ids, worth, require_wanted)
        held, begun, worth = self._best_held(token_ids)
        running = _Running(token_ids, sum(map(getsizeof, texts)), TrackedCache(self._model, self._make, after_pass))
        self._running.append(running)
        has_called = False
        try:
            cached = 0
            has_answers = any(each.role == "assistant" for each in asked.messages)
            if has_answers and shared - begun > _SEARCHED:
                cached = self._go_on(running.states, token_ids, worth)
            cached = cached or self._from_store(running.states, token_ids, shared, worth)
            running.reached = len(token_ids)
            if cached < worth and held in self._held:  # where the store fails others have had their turns
                self._held.remove(held)
                held.progress, running.states, cached = after_pass, held, begun
            running.states.read(token_ids[:-1])
            running.states.keep_checkpoint()
            with contextlib.closing(running.states.answer(generator, made)) as pieces:
                if calls:
                    told = _with_calls(pieces, calls, asked)
                else:
                    told = (Piece(*each, telling[each[0]].until(each[1]) if telling else ()) for each in pieces)
                for piece in told:
                    require_wanted()
                    has_called = has_called or piece.call is not None
                    if piece.text or piece.call:
                        yield piece
        finally:
            self._running.remove(running)
            self._hold(running.states)
        end = Answered(generator.answers(made), cached)
        for number, tells in enumerate(telling):
            if tokens := tells.rest(len(end.answers[number].token_ids)):
                yield Piece(number, "", tokens)
        if has_called and end.answers[0].finish_reason in ("stop", "interrupted"):
            end = end._replace(answers=[replace(end.answers[0], finish_reason="tool_calls")])
        yield end
        if asked.messages:
            self._keep(running.states)

    def _best_held(self, token_ids: list[int]) -> tuple[TrackedCache | None, int, int]:
        """Return the cache in memory that has most of a prompt, how many tokens, and how many it gains."""
        begun = [num_common(each.token_ids, token_ids[:-1]) for each in self._held]
        best = max(range(len(begun)), key=begun.__getitem__, default=None)
        if best is None:
            return None, 0, 0
        # It loses what it has beside those of the prompt.
        return self._held[best], begun[best], max(0, 2 * begun[best] - self._held[best].num_tokens)

    def _wait_for_others(self, token_ids: list[int], worth: int, require_wanted: Callable[[], None]) -> None:
        """Wait while others read more of a prompt into the store than a cache in memory is worth."""
        while _NOT_READ not in self._failing and (
            others := [
                (each, common)
                for each in self._running
                if (common := num_common(each.token_ids, token_ids[:-1])) > max(worth, each.reached)
            ]
        ):
            self._turns.pause(
                lambda: all(each not in self._running or each.reached >= common for each, common in others)
            )
            require_wanted()

    def _from_store(self, states: TrackedCache, token_ids: list[int], shared: int, at_least: int) -> int:
        """Read a prompt with the store if that has so many tokens; return how many it has, 0 where it fails."""
        num_tokens = 0
        if len(token_ids) > 1:
            with self._store_may_fail(_NOT_READ):
                reuse = states.read_with(
                    self._store, token_ids, document_tokens=shared, details=self._details, at_least=at_least
                )
                num_tokens = reuse.num_tokens
        return num_tokens

    def _go_on(self, states: TrackedCache, token_ids: list[int], more_than: int) -> int:
        """Take the stored conversation that has most of a prompt; return how many of its tokens are there, or 0."""
        with self._store_may_fail(_NOT_READ):
            have = [(num_common(each.token_ids.tolist(), token_ids[:-1]), each) for each in self._store.prompts()]
            common, stored = max(have, key=lambda each: each[0], default=(0, None))
            if stored is not None and common > more_than:
                with contextlib.suppress(PrefixStoreError):  # of another model, or gone
                    states.resume(self._store, stored)
                    states.go_back(common)
        return states.num_tokens

    def _keep(self, states: TrackedCache) -> None:
        """Keep a conversation with its answer; for lists it is a prompt, as it has no text to go on with."""
        if _NOT_READ in self._failing:
            return
        with self._store_may_fail("answers are not kept"):
            token_ids = states.token_ids
            assert isinstance(states.cache, HybridCache)
            self._store.keep(
                self._model, token_ids, states.cache, document_tokens=len(token_ids), details=self._details
            )

    @contextlib.contextmanager
    def _store_may_fail(self, what_follows: str) -> Iterator[None]:
        """Say once what follows if the store fails in the block."""
        try:
            yield
        except (PrefixStoreError, PrefixStoreFolderError) as error:
            if what_follows not in self._failing:
                self._remark(f"{what_follows}: {error}")
            self._failing.add(what_follows)
        else:
            self._failing.discard(what_follows)

    def _hold(self, states: TrackedCache) -> None:
        """Let a cache stay in memory."""
        states.progress = False  # without the request
        if states.num_tokens:
            self._held.append(states)
        self._make_room()

    def _make_room(self) -> None:
        """Let caches go, those used longest ago first, if all that is in memory is too large."""
        running = sum(each.text_bytes + _num_bytes(each.states) for each in self._running)
        while self._held and running + sum(map(_num_bytes, self._held)) > self._memory_bytes:
            del self._held[0]


def _with_calls(pieces: Iterator[tuple[int, str]], calls: CallForm, asked: Conversation) -> Iterator[Piece]:
    """Yield the pieces of an answer's text, and its calls; only the first where there may be no others."""
    for each in calls.parts((text for _, text in pieces), asked.parameters):
        if isinstance(each, Call):
            yield Piece(0, "", call=each)
            if not asked.is_parallel:
                return
        else:
            yield Piece(0, each)


def _num_bytes(states: TrackedCache) -> int:
    """Return the bytes of a cache, and of the tokens that it holds."""
    assert isinstance(states.cache, HybridCache)
    held = states.cache.memory()
    return held.host_bytes + held.device_bytes + _TOKEN_BYTES * states.num_tokens
