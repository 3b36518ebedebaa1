"""Questions and answers about documents that are read once."""

import os
import sys
import time
import uuid
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from ..token_ids import num_common
from .generating import Answer, Generation, Generator
from .prompts import Asked, ChatTemplate, DocumentPrompt, PromptError, context_length, room_for_documents
from .settings import DEFAULT_BITS, AnswerSettings
from .thinking import Thought
from .tracked_cache import TrackedCache, cache_maker, can_answer_together, is_out_of_memory

_LONGEST_TITLE = 100
# The details of a conversation that is kept, by which it goes on.
_TALK, _ID = "conversation", "id"


class OpenAnswerError(HybridCacheError, RuntimeError):
    """An answer of the conversation has begun, and has not ended."""


class Turn(NamedTuple):
    """A question, the text of its answer, as later questions repeat it, the generated tokens, and the thought."""

    question: str
    answer: str
    token_ids: list[int]
    thinking: str = ""


class Chat:
    """
    A conversation about documents, which are read once, or about nothing.

    The chat template is asked about the whole conversation at each question. What the cache holds of the prompt is not
    read again. One answer is generated at a time.

    Args:
        model: answers.
        tokenizer: of the model; its chat template is used if it has one.
        documents: names of files and folders, addresses (http, https), or what `read_documents` returned.
        system: system message; `None` for that of the chat template.
        context: tokens of the documents that are read at most; `None` for what leaves room to talk.
        most_tokens: of the conversation, its documents included; `None` for the model's context.
        leave: tokens that documents leave to questions and answers at least; `None` for 256 and an answer, of which
            512 count, or less in a short context, with its thought.
        cache: "dynamic", "offloaded", "quantized", or "stock" for transformers' own; or an empty cache. `None` is
            "quantized" with `bits`, else "dynamic".
        bits: of keys and values in a quantized cache, 8, 4 or 2; `None` for 4.
        cpu_decode: of the cache; `None` for its default.
        store: a `PrefixStore`, or its folder: what is read is looked for there, and kept, and so is the conversation
            after each answer.
        settings: how answers are generated.
        details: kept with the conversation, see `PrefixStore.keep`.
        progress: show how far a prompt is read; or what is called with the number of tokens of each part that is read,
            or comes from the store.
        remark: receives sentences that are no answers; `None` drops them.
        thoughts: receives the thought before an answer as it comes, in pieces, and at its end an empty one; `None`
            drops it.

    Attributes:
        turns: the questions that were asked, and their answers.
        token_ids: the tokens of the documents, questions and answers; the cache may lack the last ones.
        document: the tokens of the documents, and how many of each are read.
        cut_at: `context` where it limits what is read of them; `None` where the context does, or nothing.
        documents: their texts; `None` for a conversation that goes on.
        context: tokens that the conversation can have: those that the model can attend to, or `most_tokens`.
        details: that it is kept with, among them the form of its cache.
        settings: of the next answers; replace it to change them.
        last: the last answer; `None` before.
        reuse: what of the documents came from the store; `None` before they are read, or without a store.

    Raises:
        DocumentError: a document cannot be read.
        PromptError: the documents do not fit the model, or there is no place for a system message.
        SettingError: the model's tokenizer cannot write the form of `settings`.
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
        most_tokens: int | None = None,
        leave: int | None = None,
        cache: str | Cache | None = None,
        bits: int | None = None,
        cpu_decode: bool | None = None,
        store: PrefixStore | str | os.PathLike[str] | None = None,
        settings: AnswerSettings | None = None,
        details: Mapping[str, Any] | None = None,
        progress: bool | Callable[[int], None] = True,
        remark: Callable[[str], None] | None = None,
        thoughts: Callable[[str], None] | None = None,
    ):
        self.settings = settings or AnswerSettings()
        self.context = min(context_length(model), most_tokens or sys.maxsize)
        self.last: Answer | None = None
        self.reuse: Reuse | None = None
        self._model, self._tokenizer, self._generator = model, tokenizer, Generator(model, tokenizer)
        self._generator.forming(self.settings)
        self._progress, self._remark = progress, remark or (lambda _: None)
        self._thoughts = thoughts or (lambda _: None)
        self._template = ChatTemplate(tokenizer, system).given(self.settings)
        self._store = store if isinstance(store, PrefixStore) or store is None else PrefixStore(store)
        self.details = dict(details or {})
        given: Cache | Callable[[], Cache]
        if isinstance(cache, Cache):
            given = cache
        else:
            name = cache or ("dynamic" if bits is None else "quantized")
            given = cache_maker(name, model, bits, cpu_decode)
            self.details |= {"cache": name, "bits": (bits or DEFAULT_BITS) if name == "quantized" else None}
        self._held = TrackedCache(model, given, progress)
        self.cut_at: int | None = None
        self._document_options = context, leave
        self.documents = documents if isinstance(documents, Documents) else self._read_files(documents)
        self.document = self._fitting(self.documents)
        self._has_document = self.documents is not None
        self._go_on_from([])
        self._is_open = False
        self._title: str | None = None
        # The id of the conversation stays; that of what is stored of it changes with each answer.
        self._id = uuid.uuid4().hex
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
        talk, id = details.pop(_TALK, None), details.pop(_ID, None)
        if talk is None:
            raise ValueError(
                f"{stored.name} was kept by another version of this package, or by another program: ask its document "
                "with a new Chat."
            )
        form: dict[str, Any] = {name: details.get(name) for name in ("system", "cache", "bits")}
        chat = cls(model, tokenizer, store=store, details=details, **(form | options))
        chat._held.resume(store, stored)
        token_ids = stored.token_ids.tolist()
        chat.document = DocumentPrompt(token_ids[: stored.document_tokens])
        chat._has_document, chat.turns = talk["has_document"], [Turn(*turn) for turn in talk["turns"]]
        chat._title, chat._stored_id, chat._stored_tokens = stored.title, stored.id, token_ids
        chat._id = id or chat._id
        chat.token_ids = token_ids
        return chat

    def __repr__(self) -> str:
        return f"Chat({len(self.turns)} turns, {len(self.token_ids):,} tokens, {self.cache})"

    @property
    def cache(self) -> Cache:
        """The cache, which holds the first of the tokens."""
        return self._held.cache

    @property
    def num_missing(self) -> int:
        """The tokens that the cache lacks, which are read before the next answer; after an answer it lacks the last."""
        return len(self.token_ids) - num_common(self._held.token_ids, self.token_ids)

    @property
    def num_free(self) -> int:
        """Tokens of the context that are left."""
        return self.context - len(self.token_ids)

    @property
    def system(self) -> str | None:
        """The system message; `None` for that of the chat template. Set it, and all tokens are read again."""
        return self._template.system

    @system.setter
    def system(self, text: str | None) -> None:
        self._require_closed()
        self._take(ChatTemplate(self._tokenizer, text).given(self.settings))
        self._go_on_from(self.turns)

    def _take(self, template: ChatTemplate) -> None:
        """Let prompts begin as another template says."""
        if template is self._template:
            return
        old, new, document = self._template.start(), template.start(), self.document.token_ids
        if document[: len(old)] != old:
            raise PromptError("It cannot be told where the document of this conversation begins: nothing is set.")
        more = len(new) - len(old)
        if self.num_free <= more:
            raise PromptError(
                f"The conversation has {len(self.token_ids):,} tokens, would have {more:,} more, and the "
                f"context is {self.context:,}: the message is not set."
            )
        self._template = template
        self.document = replace(self.document, token_ids=[*new, *document[len(old) :]])

    def attach(self, documents: Sequence[str | os.PathLike[str]]) -> None:
        """
        Add documents, after those that are there and before all questions; all tokens are read again.

        Args:
            documents: names of files and folders, and addresses.

        Raises:
            DocumentError: a document cannot be read.
            PromptError: they do not fit beside the conversation, or this goes on with documents whose texts are not
                kept.
            OpenAnswerError: an answer is generated.
        """
        self._require_closed()
        if self._has_document and self.documents is None:
            raise PromptError("The text of this conversation's document is not kept, so no other one can be added.")
        added = self._read_files(documents)
        if added is None:
            return
        together = added
        if (before := self.documents) is not None:
            together = Documents((*before.files, *added.files), (*before.skipped, *added.skipped))
        self.document = self._fitting(together, len(self.token_ids) - len(self.document.token_ids))
        self.documents, self._has_document = together, True
        self._go_on_from(self.turns)

    def read(self) -> float:
        """
        Read what the cache lacks into it, documents from the store if they are there; `ask` does so by itself.

        Returns:
            the seconds that it took.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cache keeps what was read.
            OpenAnswerError: an answer is generated.
            PrefixStoreError: documents of this model cannot be kept.
        """
        self._require_closed()
        start = time.perf_counter()
        self._read(self.token_ids)
        return time.perf_counter() - start

    def ask(self, question: str, settings: AnswerSettings | None = None) -> abc.Generator[str, None, None]:
        """
        Ask a question, and yield the text of its answer as it is generated; `last` has all of it afterwards.

        Closing the iterator, or Ctrl-C, ends the answer, which stays as it is then.

        Args:
            question: its text.
            settings: of this answer; `None` for `self.settings`.

        Raises:
            PromptError: the model's context has no room for an answer, or the chat template changes the question.
            OpenAnswerError: another answer has begun, and has not ended.
            MemoryError, RuntimeError: memory ends; the question is taken back.
        """
        self._require_closed()
        self.require_room(question, settings)  # what is refused is refused before anything is read
        return self._generator.closing_at_exit(self._answer(question, self._checked(settings)))

    def complete(self, text: str, settings: AnswerSettings | None = None) -> abc.Generator[str, None, None]:
        """
        Yield what follows a text that is used as it is, without chat template and documents; otherwise as `ask`.

        It does not become a part of the conversation.

        Args:
            text: special tokens are written in it as the tokenizer does.
            settings: of the answer; `None` for `self.settings`.

        Raises:
            PromptError: the text has no tokens, or the model's context has no room for an answer.
            OpenAnswerError: another answer has begun, and has not ended.
        """
        self._require_closed()
        asked = Asked.of("", self._template.whole_prompt(text)[0], self.context)
        return self._generator.closing_at_exit(self._completed(asked, text, self._checked(settings)))

    def ask_all(
        self, questions: Sequence[str], at_once: int = 1, settings: AnswerSettings | None = None
    ) -> abc.Generator[Answer, None, None]:
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
            OpenAnswerError: another answer has begun, and has not ended.
            MemoryError, RuntimeError: memory ends with a single answer.
        """
        self._require_closed()
        for question in questions:
            self.require_room(question, settings)
        return self._generator.closing_at_exit(self._answers(questions, at_once, self._checked(settings)))

    def require_room(self, question: str, settings: AnswerSettings | None = None) -> None:
        """
        Check that a question can be asked; see `ask`.

        Raises:
            PromptError: the model's context has no room for an answer, or the chat template changes the question.
        """
        self._asked(question, settings or self.settings)

    def undo(self) -> str | None:
        """Take back the last question and its answer; return the question, or `None` if nothing was asked."""
        self._require_closed()
        if not self.turns:
            return None
        *before, last = self.turns
        self._go_on_from(before)
        return last.question

    def forget(self) -> None:
        """Take back all questions and answers."""
        self._require_closed()
        self._go_on_from([])

    def keep(self) -> None:
        """
        Keep the conversation in the store, or the document if nothing was asked, unless nothing is new.

        What was taken back since is removed; what the cache lacks is read.

        Raises:
            PrefixStoreError: a conversation of this model or cache cannot be kept.
            PrefixStoreFolderError: the folder cannot be written, or has no room.
        """
        self._require_closed()
        token_ids = self.token_ids
        if self._store is None or token_ids == self._stored_tokens:
            return
        self._read(token_ids)
        if not self.turns and self._stored_id is None:
            return
        if self._stored_id is None:
            self._take_place_of_same(self._store)
        assert isinstance(self.cache, HybridCache)
        talk = {"has_document": self._has_document, "turns": self.turns}
        self._stored_id = self._store.keep(
            self._model,
            torch.tensor([token_ids]),
            self.cache,
            document_tokens=len(self.document.token_ids),
            title=self._title or _title(self.documents, self.turns[0].question if self.turns else None),
            details=self.details | {"system": self.system, _ID: self._id, _TALK: talk},
            replaces=self._stored_id,
        )
        self._stored_tokens = token_ids

    def _take_place_of_same(self, store: PrefixStore) -> None:
        """Be the conversation that a store has with the same tokens, under the same details, so that it has one."""
        for stored in filter(lambda each: each.is_conversation, store.prompts()):
            is_alike = all(stored.details.get(name) == self.details.get(name) for name in {"name", *self.details})
            if is_alike and stored.token_ids.tolist() == self.token_ids:
                self._stored_id, self._id = stored.id, stored.details.get(_ID, self._id)

    def _require_closed(self) -> None:
        """Raise `OpenAnswerError` while an answer is generated."""
        if self._is_open:
            raise OpenAnswerError(
                "An answer of this conversation has begun, and has not ended: take all of it, or close it by .close()."
            )

    def _checked(self, settings: AnswerSettings | None) -> AnswerSettings:
        """Return the settings of an answer; raises `SettingError` if the model's tokenizer cannot write its form."""
        settings = settings or self.settings
        self._generator.forming(settings)
        return settings

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Keep others from the conversation while an answer is generated."""
        self._require_closed()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _read_files(self, names: Sequence[str | os.PathLike[str]]) -> Documents | None:
        names = [names] if isinstance(names, str | os.PathLike) else names
        return read_documents([os.fspath(name) for name in names], self._remark) if names else None

    def _fitting(self, documents: Documents | None, talk_tokens: int = 0) -> DocumentPrompt:
        """Return the tokens of the documents, as many as leave room to talk after so many tokens of a talk."""
        if documents is None:
            return DocumentPrompt(self._template.start())
        context, leave = self._document_options
        new_tokens = self._template.answer_tokens(self.settings, self.context)
        most = max(room_for_documents(self.context, leave, new_tokens) - talk_tokens, 0)
        asked = most if context is None else context + len(self._template.start())
        self.cut_at = context if asked < most else None
        return self._template.document(documents, min(asked, most))

    def _prompt(self, turns: Sequence[Turn], question: str) -> list[int]:
        """Return the tokens of a question after turns, with the documents before them."""
        texts = [text for turn in turns for text in (turn.question, turn.answer)]
        document = self.document.token_ids if self._has_document else None
        return self._template.conversation([*texts, question], document, [turn.thinking for turn in turns])

    def _go_on_from(self, turns: list[Turn]) -> None:
        """Have these turns alone, and their tokens."""
        self.turns, self.token_ids = turns, self.document.token_ids
        if turns:
            *before, last = turns
            self.token_ids = [*self._prompt(before, last.question), *last.token_ids]

    def _asked(self, question: str, settings: AnswerSettings) -> Asked:
        """Return a question with its tokens, in a prompt as settings say; see `require_room`."""
        self._take(self._template.given(settings))
        return Asked.of(question, self._prompt(self.turns, question), self.context, self._template.thought)

    def _read(self, token_ids: list[int]) -> None:
        """Let the cache hold these tokens; if it lacks the last one alone, that is read with the next ones."""
        document = self.document.token_ids
        if num_common(self._held.token_ids, document) < len(document) == num_common(token_ids, document):
            title = self._title or _title(self.documents)
            self._read_by_store(document, document_tokens=len(document), title=title)
        held = num_common(self._held.token_ids, token_ids)
        if len(token_ids) - held > 1:
            self._held.read(token_ids)
        else:
            self._held.go_back(held)

    def _read_by_store(self, token_ids: list[int], **options: Any) -> None:
        """Read tokens anew by the store, if there is one, and say what came from there."""
        if self._store is None or not isinstance(self.cache, HybridCache) or len(token_ids) < 2:
            return
        options["details"] = self.details | {"system": self.system}
        self.reuse = self._held.read_with(self._store, token_ids, **options)
        self._has_failed_to_keep = not self.reuse.is_kept  # a warning has told it
        if self.reuse.num_tokens:
            self._remark(f"{self.reuse.num_tokens:,} of {len(token_ids):,} tokens are taken from {self._store.path}")

    def _answer(self, question: str, settings: AnswerSettings) -> abc.Generator[str, None, None]:
        """Answer a question, see `ask`."""
        asked = self._asked(question, settings)
        made = Generation([asked], settings)
        try:
            with self._open():
                self._read(asked.token_ids[: num_common(asked.token_ids, self.token_ids)])
                self._held.keep_checkpoint()
                yield from self._pieces(made)
        finally:
            if token_ids := made.token_ids[0]:
                thought, text = self._generator.texts(made, token_ids)
                self.turns.append(Turn(question, text, token_ids, thought))
                self.token_ids = [*asked.token_ids, *token_ids]
                self._keep_or_say()

    def _completed(self, asked: Asked, text: str, settings: AnswerSettings) -> abc.Generator[str, None, None]:
        """Answer a whole prompt, see `complete`."""
        with self._open():
            made = Generation([asked], settings)
            self._read_by_store(asked.token_ids, title=_title(None, text))
            yield from self._pieces(made)

    def _pieces(self, made: Generation) -> abc.Generator[str, None, None]:
        """Yield the text of an answer, and make it the last one, unless it fails: then it has no tokens."""
        has_thought = False
        try:
            for _, piece in self._held.answer(self._generator, made):
                is_thought = isinstance(piece, Thought)
                if piece and (is_thought or has_thought):
                    has_thought = is_thought
                    self._thoughts(piece if is_thought else "")
                yield "" if isinstance(piece, Thought) else piece
        except Exception:
            made.token_ids[0].clear()
            raise
        finally:
            if made.token_ids[0]:
                [self.last] = self._generator.answers(made)

    def _answers(
        self, questions: Sequence[str], at_once: int, settings: AnswerSettings
    ) -> abc.Generator[Answer, None, None]:
        """Answer questions together, see `ask_all`."""
        if not isinstance(self.cache, HybridCache) or not can_answer_together(self._model):
            at_once = 1
        with self._open():
            asked, so_far = [self._asked(question, settings) for question in questions], self.token_ids
            most = self._template.answer_tokens(settings, self.context)
            while asked:
                # One whose answer the context cuts short is alone.
                have_room = takewhile(lambda each: each.room >= most, asked[:at_once])
                together = Generation(asked[: max(1, len(list(have_room)))], settings)
                before = so_far[: min(num_common(so_far, each.token_ids) for each in together.asked)]
                self._read(before)
                self._held.keep_checkpoint()
                try:
                    for _ in self._held.answer(self._generator, together):
                        pass
                except (MemoryError, RuntimeError) as error:
                    count = len(together.asked)
                    if count == 1 or not is_out_of_memory(error):
                        raise
                    at_once = count // 2
                    self._remark(f"memory ended with {count} answers at once: from here on {at_once}")
                    continue
                asked = asked[len(together.asked) :]
                yield from self._generator.answers(together)

    def _keep_or_say(self) -> None:
        """Keep the conversation, if there is a store; a failure is a remark, once."""
        try:
            self.keep()
            self._has_failed_to_keep = False
        except HybridCacheError as error:
            if not self._has_failed_to_keep:
                self._remark(f"the conversation is not kept: {error}")
            self._has_failed_to_keep = True


def _title(documents: Documents | None, question: str | None = None) -> str:
    """Return the title of a prompt, for lists: the name of its document, and a question."""
    named = [*([] if documents is None else [Path(documents.title).name]), *([] if question is None else [question])]
    title = " ".join(": ".join(named).split())
    return title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}[...]"
