"""The conversations of a server: the last ones in memory, and what was read of all in a prefix store."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..chat import Answer, AnswerSettings, Chat, ChatTemplate, Generator, PromptError, is_out_of_memory
from ..prefix_store import PrefixStore, PrefixStoreError
from ..storage import available_host_bytes
from .protocol import APIError

# Role and text of each message.
Messages = tuple[tuple[str, str], ...]
# Of the host memory that is free once the model is loaded, for conversations.
_SHARE = 4
# No message of a client.
_MARK = "\0"


class Answered(NamedTuple):
    """The end of an answer: all that is known of it, and how many tokens of the prompt were not computed for it."""

    answer: Answer
    cached_tokens: int


class Engine:
    """
    Answers prompts, one at a time, each from what was read before.

    A conversation that is in memory goes on from the tokens that it has. Any other prompt goes through the store.

    Args:
        model: answers.
        tokenizer: of the model.
        store: finds and keeps what is read.
        memory_bytes: of the caches of conversations that stay in memory, those used longest ago go first; `None` for a
            quarter of what is free.
        remark: receives sentences for who runs the server.
        cache: name, bits and `cpu_decode` of the caches, as `Chat` takes them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        store: PrefixStore,
        *,
        memory_bytes: int | None,
        remark: Callable[[str], None],
        **cache: Any,
    ):
        self._model, self._tokenizer, self._template = model, tokenizer, ChatTemplate(tokenizer)
        self._memory_bytes = available_host_bytes() // _SHARE if memory_bytes is None else memory_bytes
        self._held = OrderedDict[Messages, Chat]()
        self._options: dict[str, Any] = cache | {"remark": remark, "generator": Generator(model, tokenizer)}
        self._require_wanted: Callable[[], None] = lambda: None
        try:
            store.why(model, [0, 1], self._new_chat().cache)  # type: ignore[arg-type]
            self._options |= {"store": store, "keeps_answers": False}
        except PrefixStoreError as error:
            remark(f"prompts are not kept, and each is read anew: {error}")

    def answer(
        self, prompt: Messages | str, settings: AnswerSettings, require_wanted: Callable[[], None]
    ) -> Iterator[str | Answered]:
        """
        Yield the text of an answer in pieces, and then what is known of it.

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
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._held.clear()
            message = "Memory has ended, so no conversation is in memory now. Ask again, or with a shorter prompt."
            raise APIError(503, message, "out_of_memory") from error

    def _answered(self, prompt: Messages | str, settings: AnswerSettings) -> Iterator[str | Answered]:
        messages = () if isinstance(prompt, str) else tuple((role, text.strip()) for role, text in prompt)
        held = self._taken(messages[:-1]) if messages and messages[-1][0] == "user" else None
        chat, said = held or self._new_chat(), list[str]()
        cached, num_turns = len(chat.token_ids) - chat.num_missing if held else 0, len(chat.turns)
        try:
            if held:
                pieces = chat.ask(messages[-1][1], settings)
            else:
                text = prompt if isinstance(prompt, str) else self._text(prompt)
                pieces = chat.complete(text, settings, self._document_characters(prompt, text))
            with contextlib.closing(pieces):  # type: ignore[type-var]
                for piece in pieces:
                    self._require_wanted()
                    if piece:
                        said.append(piece)
                        yield piece
        finally:
            if messages and chat.turns:
                answer = ("assistant", "".join(said).strip())
                self._hold((*messages, answer) if len(chat.turns) > num_turns else messages[:-1], chat)
        assert chat.last is not None
        yield Answered(chat.last, cached or (chat.reuse.num_tokens if chat.reuse else 0))

    def _new_chat(self) -> Chat:
        # A chat calls `progress` after each pass, when what was read is kept.
        return Chat(self._model, self._tokenizer, progress=lambda _: self._require_wanted(), **self._options)

    def _text(self, messages: Messages) -> str:
        return self._template.text_of([{"role": role, "content": content} for role, content in messages])

    def _document_characters(self, prompt: Messages | str, text: str) -> int:
        """Return where the question may begin: after the last blank line, or with the last message."""
        if isinstance(prompt, str):
            return text.rfind("\n\n") + 2 if "\n\n" in text else 0
        role, last = prompt[-1]
        start = max(0, self._text((*prompt[:-1], (role, _MARK))).rfind(_MARK))
        return max(start, text.rfind("\n\n", start, start + len(last.strip())) + 2)

    def _taken(self, before: Messages) -> Chat | None:
        """Take the conversation with these messages out of memory; what was asked after them is taken back."""
        for messages in sorted(self._held, key=len):
            turns, rest = divmod(len(messages) - len(before), 2)
            if messages[: len(before)] == before and not rest and turns < len(self._held[messages].turns):
                chat = self._held.pop(messages)
                for _ in range(turns):
                    chat.undo()
                return chat
        return None

    def _hold(self, messages: Messages, chat: Chat) -> None:
        """Let a conversation stay in memory, without those used longest ago if all together are too large."""
        self._held[messages] = chat
        self._held.move_to_end(messages)
        while self._held and sum(map(_num_bytes, self._held.values())) > self._memory_bytes:
            self._held.popitem(last=False)


def _num_bytes(chat: Chat) -> int:
    assert isinstance(chat.cache, HybridCache)
    held = chat.cache.memory()
    return held.host_bytes + held.device_bytes
