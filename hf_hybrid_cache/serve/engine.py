"""The answers of a server: what the caches in memory hold of a prompt is not read again, nor what a store has of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..chat import (
    Answer,
    AnswerSettings,
    Asked,
    ChatTemplate,
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

# Role and text of each message, and perhaps the thought before it.
Messages = tuple[tuple[str, ...], ...]
# Of the host memory that is free once the model is loaded, for caches.
_SHARE = 4


class Answered(NamedTuple):
    """The end of answers: all that is known of them, and how many tokens of the prompt were not computed for them."""

    answers: list[Answer]
    cached_tokens: int


class Engine:
    """
    Answers prompts, one at a time, each from what was read before.

    A request is tokenized whole. What it begins with is taken from a cache in memory, or from the store.

    Args:
        model: answers.
        tokenizer: of the model.
        store: finds and keeps what is read.
        memory_bytes: of the caches that stay in memory, those used longest ago go first; `None` for a quarter of what
            is free.
        remark: receives sentences for who runs the server.
        cache: name of the caches, as `Chat` takes it.
        bits: of their keys and values, likewise.
        cpu_decode: of them, likewise.

    Attributes:
        context: tokens of the model's context.
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
        self._make, self.context = cache_maker(cache, model, bits, cpu_decode), context_length(model)
        self._most_characters = self.context * max(map(len, tokenizer.get_vocab()))
        self._details = {"cache": cache, "bits": bits}
        self._memory_bytes = available_host_bytes() // _SHARE if memory_bytes is None else memory_bytes
        # The one used last is the last.
        self._held = list[TrackedCache]()
        self._has_failed_to_keep = False
        self._require_wanted: Callable[[], None] = lambda: None

    def answer(
        self,
        prompt: Messages | str,
        settings: AnswerSettings,
        require_wanted: Callable[[], None],
        answers: int = 1,
        top_logprobs: int | None = None,
    ) -> Iterator[Piece | Answered]:
        """
        Yield the texts of answers in pieces, and then what is known of them.

        Args:
            prompt: a conversation, or a text that is used as it is.
            settings: of the answers.
            require_wanted: is called after each step, and pass over a prompt, and raises an error to end the answers.
            answers: to the prompt, which are generated together; see `Generation`.
            top_logprobs: of their tokens, likewise.

        Raises:
            APIError: the prompt does not fit, or memory has ended.
        """
        require_wanted()
        self._require_wanted = require_wanted
        try:
            yield from self._answered(prompt, settings, answers, top_logprobs)
        except PromptError as error:
            raise APIError(400, str(error), "invalid_prompt") from error
        except SettingError as error:
            where = "logprobs" if str(error).startswith("logprobs") else "response_format"
            raise APIError(400, str(error), "invalid_value", where) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._held.clear()
            message = "Memory has ended, so no conversation is in memory now. Ask again, or with a shorter prompt."
            raise APIError(503, message, "out_of_memory") from error

    def _answered(
        self, prompt: Messages | str, settings: AnswerSettings, answers: int, top_logprobs: int | None
    ) -> Iterator[Piece | Answered]:
        self._generator.forming(settings)  # what is refused is refused before anything is read
        template = self._template.given(settings)
        texts = [prompt] if isinstance(prompt, str) else [text for _, *texts in prompt for text in texts]
        if (characters := sum(map(len, texts))) > self._most_characters:  # not even the longest tokens would fit
            raise PromptError(f"The prompt has {characters:,} characters, and the model's context is {self.context:,}.")
        token_ids, shared = template.whole_prompt(prompt) if isinstance(prompt, str) else template.request(prompt)
        thought = None if isinstance(prompt, str) else template.thought
        made = Generation([Asked.of("", token_ids, self.context, thought)], settings, answers, top_logprobs)
        numbers = range(answers if made.log_probabilities else 0)
        telling = [Telling(made, number, self._generator) for number in numbers]
        # A cache in memory loses what it has beside that of the prompt.
        begun = [num_common(each.token_ids, token_ids[:-1]) for each in self._held]
        best = max(range(len(begun)), key=begun.__getitem__, default=None)
        worth = 0 if best is None else max(0, 2 * begun[best] - self._held[best].num_tokens)
        states = TrackedCache(self._model, self._make, lambda _: self._require_wanted())
        try:
            cached = self._from_store(states, token_ids, shared, worth)
            if best is not None and cached < worth:
                states, cached = self._held.pop(best), begun[best]
            states.read(token_ids[:-1])
            states.keep_checkpoint()
            with contextlib.closing(states.answer(self._generator, made)) as pieces:
                for number, text in pieces:
                    self._require_wanted()
                    if text:
                        yield Piece(number, text, telling[number].until(text) if telling else ())
        finally:
            self._hold(states)
        end = Answered(self._generator.answers(made), cached)
        for number, tells in enumerate(telling):
            if tokens := tells.rest(len(end.answers[number].token_ids)):
                yield Piece(number, "", tokens)
        yield end

    def _from_store(self, states: TrackedCache, token_ids: list[int], shared: int, at_least: int) -> int:
        """Read a prompt with the store if that has so many tokens; return how many it has, 0 where it fails."""
        if len(token_ids) < 2:
            return 0
        try:
            reuse = states.read_with(
                self._store, token_ids, document_tokens=shared, details=self._details, at_least=at_least
            )
        except (PrefixStoreError, PrefixStoreFolderError) as error:
            if not self._has_failed_to_keep:
                self._remark(f"prompts are not kept, and each is read anew: {error}")
            self._has_failed_to_keep = True
            return 0
        self._has_failed_to_keep = False
        return reuse.num_tokens

    def _hold(self, states: TrackedCache) -> None:
        """Let a cache stay in memory, without those used longest ago if all together are too large."""
        if states.num_tokens:
            self._held.append(states)
        while self._held and sum(map(_num_bytes, self._held)) > self._memory_bytes:
            del self._held[0]


def _num_bytes(states: TrackedCache) -> int:
    assert isinstance(states.cache, HybridCache)
    held = states.cache.memory()
    return held.host_bytes + held.device_bytes
