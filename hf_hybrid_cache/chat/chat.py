"""Questions and answers about documents that are read once."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..cache import HybridCache
from ..documents import Documents, read_documents
from ..errors import HybridCacheError
from ..prefix_store import PrefixStore, Reuse, StoredPrompt
from .generating import Answer, FinishReason, Generator, Rows
from .prompts import ChatTemplate, DocumentPrompt, PromptError, context_length
from .settings import DEFAULT_BITS, AnswerSettings
from .states import States, cache_maker, can_answer_together, is_out_of_memory

# Answers that are generated together at most, unless told otherwise.
MOST_TOGETHER = 32
# Tokens of a long context that documents leave to questions and answers.
_TALK_TOKENS = 2048
_LONGEST_TITLE = 100


class Turn(NamedTuple):
    """A question that was asked, and the number of tokens before it, and before its answer."""

    start: int
    question: str
    answer: int


@dataclass(frozen=True)
class _Asked:
    """A question, its tokens, and the tokens of an answer for which the model's context has room."""

    question: str
    token_ids: list[int]
    room: int


class Chat:
    """
    A conversation about documents, which are read once, or about nothing.

    Args:
        model: answers.
        tokenizer: of the model; its chat template is used if it has one.
        documents: names of files and folders, or what `read_documents` returned.
        system: system message; `None` for that of the chat template.
        context: tokens of the documents that are read at most; `None` for what leaves room to talk.
        leave: tokens that documents leave to questions and answers; `None` for 2,048, or a quarter of a short context,
            and an answer.
        cache: "dynamic", "offloaded", "quantized", or "stock" for transformers' own; or an empty cache. `None` is
            "quantized" with `bits`, else "dynamic".
        bits: of keys and values in a quantized cache, 8, 4 or 2; `None` for 4.
        cpu_decode: of the cache; `None` for its default.
        store: a `PrefixStore`, or its folder: what is read is looked for there, and kept, and so is the conversation
            after each answer.
        settings: how answers are generated.
        keeps_answers: keep the conversation after each answer, not only what is read before the first one.
        details: kept with the conversation, see `PrefixStore.keep`.
        generator: of another conversation with this model, for one of many that take turns.
        progress: show how far a prompt is read; or what is called with the number of tokens of each part that is read,
            or comes from the store.
        remark: receives sentences that are no answers; `None` drops them.

    Attributes:
        token_ids: of the documents, questions and answers; the cache may lack the last ones.
        turns: the questions that were asked.
        document: the tokens of the documents, and how many of each are read.
        documents: their texts; `None` for a conversation that goes on.
        context: tokens that the model can attend to.
        settings: of the next answers; replace it to change them.
        last: the last answer; `None` before.
        reuse: what of the documents came from the store; `None` before they are read, or without a store.

    Raises:
        DocumentError: a document cannot be read.
        PromptError: the documents do not fit the model, or there is no place for a system message.
        ValueError: there is no such cache, or it has no bits.
        PrefixStoreFolderError: the folder cannot be used.

    Example:
        >>> chat = Chat(model, tokenizer, documents=["report.pdf", "letters/"], bits=8, store="prompts")
        >>> for text in chat.ask("Who signed it?"):
        ...     print(text, end="")
        >>> answers = list(chat.ask_all(["When?", "Where?"]))
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[str | os.PathLike[str]] | Documents = (),
        *,
        system: str | None = None,
        context: int | None = None,
        leave: int | None = None,
        cache: str | Cache | None = None,
        bits: int | None = None,
        cpu_decode: bool | None = None,
        store: PrefixStore | str | os.PathLike[str] | None = None,
        settings: AnswerSettings | None = None,
        keeps_answers: bool = True,
        details: Mapping[str, Any] | None = None,
        generator: Generator | None = None,
        progress: bool | Callable[[int], None] = True,
        remark: Callable[[str], None] | None = None,
    ):
        self.settings = settings or AnswerSettings()
        self.context = context_length(model)
        self.turns: list[Turn] = []
        self.last: Answer | None = None
        self.reuse: Reuse | None = None
        self._model, self._tokenizer, self._generator = model, tokenizer, generator or Generator(model, tokenizer)
        self._progress, self._remark = progress, remark or _ignore
        self._template = ChatTemplate(tokenizer, system)
        self._store = store if isinstance(store, PrefixStore) or store is None else PrefixStore(store)
        self._details, self._keeps_answers = dict(details or {}), keeps_answers
        given: Cache | Callable[[], Cache]
        if isinstance(cache, Cache):
            given = cache
        else:
            name = cache or ("dynamic" if bits is None else "quantized")
            given = cache_maker(name, model, bits, cpu_decode)
            self._details |= {"cache": name, "bits": (bits or DEFAULT_BITS) if name == "quantized" else None}
        self._states = States(model, given, progress)
        self.documents = documents if isinstance(documents, Documents) else self._read_files(documents)
        self.document = self._fitting(self.documents, context, leave)
        self._has_document = self.documents is not None
        self.token_ids = list(self.document.token_ids)
        self._document_tokens = len(self.token_ids)
        # Of a text that is used as it is: the tokens that others begin with, too, and the one before the answer.
        self._shared_tokens, self._before_answer = 0, 0
        self._title: str | None = None
        self._stored_id: str | None = None
        self._stored_tokens: list[int] = []
        self._has_failed_to_keep = False

    @classmethod
    def resume(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        store: PrefixStore | str | os.PathLike[str],
        stored: StoredPrompt | None = None,
        **options: Any,
    ) -> Self:
        """
        Go on with a conversation, or a document, that was kept.

        Args:
            model: that answered.
            tokenizer: of the model.
            store: a `PrefixStore`, or its folder.
            stored: one of the `prompts()` of the store; `None` for the conversation that was used last.
            options: of `Chat`, but for documents, cache and system message, which are those of the conversation.

        Raises:
            ValueError: the store has no conversation.
            PrefixStoreError: it is of another model or other weights; or it is gone, or damaged.
            PrefixStoreFolderError: the folder cannot be read.
        """
        store = store if isinstance(store, PrefixStore) else PrefixStore(store)
        stored = stored or next((each for each in store.prompts() if each.is_conversation), None)
        if stored is None:
            raise ValueError(f"{store.path} has no conversation: begin one with Chat(..., store={str(store.path)!r}).")
        details = dict(stored.details)
        turns = details.pop("turns", ())
        form: dict[str, Any] = {name: details.get(name) for name in ("system", "cache", "bits")}
        chat = cls(model, tokenizer, store=store, details=details, **(form | options))
        assert isinstance(chat.cache, HybridCache)
        store.resume(model, stored, chat.cache)
        chat.token_ids, chat._document_tokens = stored.token_ids.tolist(), stored.document_tokens
        chat.document = DocumentPrompt(chat.token_ids[: stored.document_tokens])
        chat._has_document = chat.document.token_ids != chat._template.start()
        chat.turns = [Turn(*turn) for turn in turns]
        chat._title, chat._stored_id, chat._stored_tokens = stored.title, stored.id, list(chat.token_ids)
        return chat

    def __repr__(self) -> str:
        return f"Chat({len(self.turns)} turns, {len(self.token_ids):,} tokens, {self.cache})"

    @property
    def cache(self) -> Cache:
        """The cache, which holds the first of the tokens."""
        return self._states.cache

    @property
    def num_missing(self) -> int:
        """The tokens that the cache lacks, which are read before the next answer; after an answer it lacks the last."""
        return len(self.token_ids) - self._states.num_tokens

    @property
    def num_free(self) -> int:
        """Tokens of the model's context that are left."""
        return self.context - len(self.token_ids)

    @property
    def system(self) -> str | None:
        """The system message; `None` for that of the chat template. Set it, and all tokens are read again."""
        return self._template.system

    @system.setter
    def system(self, text: str | None) -> None:
        old, template = self._template.start(), ChatTemplate(self._tokenizer, text)
        new = template.start()
        if self.token_ids[: len(old)] != old:
            raise PromptError("It cannot be told where the document of this conversation begins: no message is set.")
        more = len(new) - len(old)
        if self.num_free <= more:
            raise PromptError(
                f"The conversation has {len(self.token_ids):,} tokens, would have {more:,} more, and the model's "
                f"context is {self.context:,}: the message is not set."
            )
        self._template = template
        self.token_ids[: len(old)] = new
        self.turns = [turn._replace(start=turn.start + more, answer=turn.answer + more) for turn in self.turns]
        self._document_tokens += more
        self._states.forget()

    def read(self) -> float:
        """
        Read what the cache lacks into it, documents from the store if they are there; `ask` does so by itself.

        Returns:
            the seconds that it took.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cache keeps what was read.
            PrefixStoreError: documents of this model cannot be kept.
        """
        start = time.perf_counter()
        if self._states.num_tokens < self._document_tokens:
            with self._states.whole_afterwards():
                self._read_document()
        if self.num_missing > 1:
            self._states.read(torch.tensor([self.token_ids]))
        return time.perf_counter() - start

    def ask(self, question: str, settings: AnswerSettings | None = None) -> Iterator[str]:
        """
        Ask a question, and yield the text of its answer as it is generated; `last` has all of it afterwards.

        Closing the iterator, or Ctrl-C, ends the answer, which stays as it is then.

        Args:
            question: its text.
            settings: of this answer; `None` for `self.settings`.

        Raises:
            PromptError: the model's context has no room for an answer, or the chat template changes the question.
            MemoryError, RuntimeError: memory ends; the question is taken back.
        """
        asked = self._asked(question)
        return self._answer(asked, settings or self.settings)

    def complete(self, text: str, settings: AnswerSettings | None = None, shared: int = 0) -> Iterator[str]:
        """
        Yield what follows a text that is used as it is, without chat template and documents; otherwise as `ask`.

        Args:
            text: with which the conversation begins.
            settings: of the answer; `None` for `self.settings`.
            shared: characters with which other texts begin, too, such as a document: they find in the store what is
                read of it.

        Raises:
            ValueError: the conversation has a document, or a question.
            PromptError: the text has no tokens, or the model's context has no room for an answer.
        """
        if self.documents is not None or self.turns:
            raise ValueError("A text that is used as it is begins a conversation: use a new Chat without documents.")
        token_ids, shared_tokens = self._template.without_template(text, shared)
        room = self.context - len(token_ids)
        if room < 1:
            raise PromptError(
                f"The prompt has {len(token_ids):,} tokens, and the model's context is {self.context:,}: no room is "
                "left for an answer. Shorten it, or use it as a document, which is cut to fit."
            )
        self._states.forget()
        self.token_ids, self._title = token_ids[:-1], _title(None, text)
        self._document_tokens, self._shared_tokens = len(self.token_ids), shared_tokens
        self._before_answer = token_ids[-1]
        return self._answer(_Asked("", token_ids[-1:], room), settings or self.settings)

    def ask_all(
        self, questions: Sequence[str], at_once: int = 1, settings: AnswerSettings | None = None
    ) -> Iterator[Answer]:
        """
        Ask questions, each after the conversation so far, which none of them becomes a part of; yield their answers.

        Answers that are generated together read the model's weights once for all of them. In 16 bits, in a quantized
        cache, and with sampling, they depend on those beside them.

        Args:
            questions: their texts.
            at_once: answers that are generated together at most; half as many whenever memory ends.
            settings: of these answers; `None` for `self.settings`.

        Raises:
            PromptError: the context has no room for a question and an answer; nothing is asked then.
            MemoryError, RuntimeError: memory ends with a single answer.
        """
        return self._answers([self._asked(question) for question in questions], at_once, settings or self.settings)

    def require_room(self, question: str) -> None:
        """
        Check that a question can be asked.

        Raises:
            PromptError: the model's context has no room for an answer, or the chat template changes the question.
        """
        self._asked(question)

    def undo(self) -> str | None:
        """Take back the last question and its answer; return the question, or `None` if nothing was asked."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self._shorten(turn.start)
        return turn.question

    def forget(self) -> None:
        """Take back all questions and answers."""
        self.turns.clear()
        self._shorten(self._document_tokens)

    def keep(self) -> None:
        """
        Keep the conversation in the store, or the document if nothing was asked, unless nothing is new.

        What was taken back since is removed; what the cache lacks is read.

        Raises:
            PrefixStoreError: a conversation of this model or cache cannot be kept.
            PrefixStoreFolderError: the folder cannot be written, or has no room.
        """
        if self._store is None or self.token_ids == self._stored_tokens:
            return
        self.read()
        if not self.turns and self._stored_id is None:
            return
        assert isinstance(self.cache, HybridCache)
        self._stored_id = self._store.keep(
            self._model,
            torch.tensor([self.token_ids]),
            self.cache,
            document_tokens=self._document_tokens,
            title=self._title or _title(self.documents, self.turns[0].question if self.turns else None),
            details=self._all_details() | {"turns": [list(turn) for turn in self.turns]},
            replaces=self._stored_id,
        )
        self._stored_tokens = list(self.token_ids)

    def _read_files(self, names: Sequence[str | os.PathLike[str]]) -> Documents | None:
        names = [names] if isinstance(names, str | os.PathLike) else names
        return read_documents([os.fspath(name) for name in names], self._remark) if names else None

    def _fitting(self, documents: Documents | None, context: int | None, leave: int | None) -> DocumentPrompt:
        """Return the tokens of the documents, as many as leave room to talk."""
        if documents is None:
            return DocumentPrompt(self._template.start())
        if leave is None:
            leave = self.settings.max_new_tokens + min(_TALK_TOKENS, self.context // 4)
        if self.context <= leave:
            raise PromptError(
                f"{leave:,} tokens are left to questions and answers, and the model's context is {self.context:,}: "
                "ask for shorter answers."
            )
        most = self.context - leave
        if context is not None:
            most = min(most, context + len(self._template.start()))
        return self._template.document(documents, most)

    def _asked(self, question: str) -> _Asked:
        """Return a question with its tokens; see `require_room`."""
        if len(self.token_ids) == self._document_tokens:
            new = self._template.first_question(question, after_document=self._has_document)
        else:
            new = self._template.next_question(question, self.token_ids[-1])
        room = self.num_free - len(new)
        if room < 1:
            raise PromptError(
                f"The conversation has {len(self.token_ids):,} tokens, the question {len(new):,}, and the model's "
                f"context is {self.context:,}: no room is left for an answer."
            )
        return _Asked(question, new, room)

    def _answer(self, asked: _Asked, settings: AnswerSettings) -> Iterator[str]:
        """Answer a question, see `ask`."""
        before, start, rows = len(self.token_ids), time.perf_counter(), Rows()
        prompt = torch.tensor([[*self.token_ids, *asked.token_ids]])
        limit, is_whole = min(settings.max_new_tokens, asked.room), False
        try:
            with self._states.whole_afterwards():
                self.read()
                self._states.keep_checkpoint()
                self._states.read(prompt[:, :-1])
                mask, settings = torch.ones_like(prompt), replace(settings, max_new_tokens=limit)
                yield from self._generator.pieces(prompt, mask, self.cache, settings, rows)
                is_whole = True
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            rows.token_ids[0].clear()
            raise
        finally:
            token_ids = rows.token_ids[0]
            if token_ids:
                self.token_ids += [*asked.token_ids, *token_ids]
                self.turns.append(Turn(before, asked.question, prompt.shape[1]))
                self.last = self._recorded(asked, token_ids, prompt.shape[1], start, rows, settings, is_whole)
                if self._keeps_answers:
                    self._keep_or_say()
            else:
                self._shorten(before)

    def _recorded(
        self,
        asked: _Asked,
        token_ids: list[int],
        prompt_tokens: int,
        start: float,
        rows: Rows,
        settings: AnswerSettings,
        is_whole: bool = True,
    ) -> Answer:
        """Return an answer with all that is known of it."""
        reason: FinishReason = "stop"
        if not is_whole:
            reason = "interrupted"
        elif not self._generator.is_ended(token_ids, settings.stop):
            reason = "context" if len(token_ids) >= asked.room else "length"
        return Answer(
            question=asked.question,
            text=self._generator.text(token_ids, settings.stop),
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            first_token_seconds=(rows.first or rows.last) - start,
            seconds=rows.last - start,
            together=len(rows.token_ids),
        )

    def _answers(self, asked: list[_Asked], at_once: int, settings: AnswerSettings) -> Iterator[Answer]:
        """Answer questions together, see `ask_all`."""
        if not isinstance(self.cache, HybridCache) or not can_answer_together(self._model):
            at_once = 1
        while asked:
            self.read()
            # One whose answer the context cuts short is alone.
            have_room = takewhile(lambda each: each.room >= settings.max_new_tokens, asked[:at_once])
            together = asked[: max(1, len(list(have_room)))]
            try:
                answers = self._answered_together(together, settings)
            except (MemoryError, RuntimeError) as error:
                if len(together) == 1 or not is_out_of_memory(error):
                    raise
                at_once = len(together) // 2
                self._remark(f"memory ended with {len(together)} answers at once: from here on {at_once}")
                continue
            asked = asked[len(together) :]
            yield from answers

    def _answered_together(self, together: Sequence[_Asked], settings: AnswerSettings) -> list[Answer]:
        """Answer questions together, and let the cache go back to the conversation."""
        base, start, rows = len(self.token_ids), time.perf_counter(), Rows(len(together))
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, together[0].room))
        prompts, mask = self._prompts_together([each.token_ids for each in together])
        self._states.keep_checkpoint()
        try:
            with self._states.whole_afterwards():
                self._states.read(prompts[:, :-1], mask[:, :-1])
                for _ in self._generator.pieces(prompts, mask, self.cache, settings, rows):
                    pass
        finally:
            self._shorten(base, len(together))
        return [
            self._recorded(
                each,
                self._generator.until_end(token_ids, settings.stop),
                base + len(each.token_ids),
                start,
                rows,
                settings,
            )
            for each, token_ids in zip(together, rows.token_ids, strict=True)
        ]

    def _prompts_together(self, questions: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the prompts of several questions, `[questions, tokens]`, and their attention mask.

        Shorter questions are padded before them, so that all prompts begin with the conversation. Padding is a token of
        the conversation, which a repetition penalty counts already.
        """
        longest = max(map(len, questions))
        padding = [longest - len(question) for question in questions]
        filler = self.token_ids[-1] if self.token_ids else 0
        rows = [[*self.token_ids, *[filler] * pads, *ids] for pads, ids in zip(padding, questions, strict=True)]
        input_ids = torch.tensor(rows)
        positions = torch.arange(input_ids.shape[1]) - len(self.token_ids)
        is_padding = (positions >= 0) & (positions < torch.tensor(padding)[:, None])
        return input_ids, (~is_padding).long()

    def _read_document(self) -> None:
        """Take the document from the store, if there is one, or read it."""
        prompt = self.token_ids[: self._document_tokens]
        document = torch.tensor([prompt])
        if self._store is None or not isinstance(self.cache, HybridCache) or document.shape[1] < 2:
            self._states.read(document)
            return
        self._states.forget()
        shared = self._shared_tokens
        self.reuse = self._store.prefill(
            self._model,
            [*prompt, self._before_answer] if shared else prompt,
            self.cache,
            document_tokens=shared or self._document_tokens,
            title=self._title or _title(self.documents),
            details=self._all_details(),
            progress=self._progress,
        )
        if self.reuse.num_tokens:
            self._remark(f"{self.reuse.num_tokens:,} of {document.shape[1]:,} tokens are taken from {self._store.path}")

    def _shorten(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Remove all tokens after the first `num_tokens`, and sequences beside the first."""
        del self.token_ids[num_tokens:]
        self._states.shorten(num_tokens, num_sequences)

    def _keep_or_say(self) -> None:
        """Keep the conversation, if there is a store; a failure is a remark, once."""
        try:
            self.keep()
            self._has_failed_to_keep = False
        except HybridCacheError as error:
            if not self._has_failed_to_keep:
                self._remark(f"the conversation is not kept: {error}")
            self._has_failed_to_keep = True

    def _all_details(self) -> dict[str, Any]:
        return self._details | {"system": self.system}


def _title(documents: Documents | None, question: str | None = None) -> str:
    """Return the title of a prompt, for lists: the name of its document, and a question."""
    named = [*([] if documents is None else [Path(documents.title).name]), *([] if question is None else [question])]
    title = " ".join(": ".join(named).split())
    return title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}[...]"


def _ignore(remark: str) -> None:
    """Drop a remark."""
