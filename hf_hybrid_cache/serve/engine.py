"""The answers of a server: what the caches in memory hold of a prompt is not read again, nor what a store has of it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..chat import (
    Answer,
    AnswerSettings,
    Asked,
    Call,
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
from .protocol import APIError

# Of the host memory that is free once the model is loaded, for caches.
_SHARE = 4


class Answered(NamedTuple):
    """The end of an answer: all that is known of it, and how many tokens of the prompt were not computed for it."""

    answer: Answer
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
        self.takes_tools = self._template.calls is not None
        self._make, self.context = cache_maker(cache, model, bits, cpu_decode), context_length(model)
        self._most_characters = self.context * max(map(len, tokenizer.get_vocab()))
        self._details = {"cache": cache, "bits": bits}
        self._memory_bytes = available_host_bytes() // _SHARE if memory_bytes is None else memory_bytes
        # The one used last is the last.
        self._held = list[TrackedCache]()
        self._has_failed_to_keep = False
        self._require_wanted: Callable[[], None] = lambda: None

    def answer(
        self, prompt: Conversation | str, settings: AnswerSettings, require_wanted: Callable[[], None]
    ) -> Iterator[str | Call | Answered]:
        """
        Yield the text of an answer in pieces, those of its thought as `Thought`, its calls, and what is known of it.

        Args:
            prompt: a conversation, or a text that is used as it is.
            settings: of the answer.
            require_wanted: is called after each step, and pass over a prompt, and raises an error to end the answer.

        Raises:
            APIError: the prompt does not fit, or memory has ended.
        """
        require_wanted()
        self._require_wanted = require_wanted
        try:
            yield from self._answered(prompt, settings)
        except PromptError as error:
            raise APIError(400, str(error), "invalid_prompt") from error
        except SettingError as error:
            name = "tools" if str(error).startswith("tools ") else "response_format"
            raise APIError(400, str(error), "invalid_value", name) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._held.clear()
            message = "Memory has ended, so no conversation is in memory now. Ask again, or with a shorter prompt."
            raise APIError(503, message, "out_of_memory") from error

    def _answered(self, prompt: Conversation | str, settings: AnswerSettings) -> Iterator[str | Call | Answered]:
        template = self._template.given(settings)
        asked = Conversation(()) if isinstance(prompt, str) else prompt
        calls = self._template.calls if asked.functions else None
        settings = calls.held(settings, asked) if calls else settings
        self._generator.forming(settings)  # what is refused is refused before anything is read
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
        made = Generation([Asked.of("", token_ids, self.context, thought)], settings)
        # A cache in memory loses what it has beside that of the prompt.
        begun = [num_common(each.token_ids, token_ids[:-1]) for each in self._held]
        best = max(range(len(begun)), key=begun.__getitem__, default=None)
        worth = 0 if best is None else max(0, 2 * begun[best] - self._held[best].num_tokens)
        states, has_called = TrackedCache(self._model, self._make, lambda _: self._require_wanted()), False
        try:
            cached = self._from_store(states, token_ids, shared, worth)
            if best is not None and cached < worth:
                states, cached = self._held.pop(best), begun[best]
            states.read(token_ids[:-1])
            states.keep_checkpoint()
            with contextlib.closing(states.answer(self._generator, made)) as pieces:
                for piece in calls.parts(pieces, asked.names) if calls else pieces:
                    self._require_wanted()
                    if piece:
                        yield piece
                    has_called = has_called or isinstance(piece, Call)
                    if has_called and not asked.is_parallel:
                        break
        finally:
            self._hold(states)
        [answer] = self._generator.answers(made)
        if has_called and answer.finish_reason in ("stop", "interrupted"):
            answer = replace(answer, finish_reason="tool_calls")
        yield Answered(answer, cached)

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
