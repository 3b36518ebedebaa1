"""The questions of a batch, those about one document after the other, and their answers or errors."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import HybridCacheError
from .answers import documents_digest
from .batch_progress import BatchProgress
from .console import note, out_of_memory
from .options import AnswerOptions, Cache, Model, Prompt, Store
from .questions import Question

if TYPE_CHECKING:
    from ..chat import Answer, Chat
    from .loading import LoadedModel

# A question, and the fields that its answer has beside those of the question.
Outcome = tuple[Question, dict[str, Any]]


@dataclass(frozen=True)
class BatchOptions:
    """The options that answer all questions of a file; `at_once` is `None` for auto."""

    prompt: Prompt
    cache: Cache
    model: Model
    answer: AnswerOptions
    store: Store
    at_once: int | None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all answers in a file have alike; `at_once` may be another one after an interruption."""
        # Names and places are those of the first files of answers, in which later options are missing, as null is.
        sampling = {name: getattr(self.answer, name) for name in ("temperature", "top_p", "repetition_penalty", "seed")}
        given = asdict(self.prompt) | asdict(self.cache) | asdict(self.model)
        del given["device"]
        return given | {
            "cache": self.cache.name,
            "max_new_tokens": self.answer.settings().max_new_tokens,
            "sampling": sampling,
            "top_k": self.answer.top_k,
            "stop": self.answer.stop or None,
        }


class BatchReader:
    """Answers the questions about one document after the other, with a model."""

    def __init__(
        self, loaded: "LoadedModel", options: BatchOptions, folder: Path, progress: BatchProgress, notes: Console
    ):
        from ..chat import MOST_TOGETHER, ChatTemplate, can_answer_together
        from .loading import compile_kernels

        self._options, self._folder, self._progress, self._notes = options, folder, progress, notes
        self._store, self._settings = options.store.open(), options.answer.settings()
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._template = ChatTemplate(loaded.tokenizer, options.prompt.system)
        self._template.start()  # what is refused here no question could have
        compile_kernels(loaded.model, options.cache.name == "quantized", notes)
        self._at_once = options.at_once or MOST_TOGETHER
        if self._at_once > 1 and not can_answer_together(loaded.model):
            note(notes, "not all layers of this model attend to all tokens: its questions are answered one at a time")

    def outcomes(self, groups: Sequence[Sequence[Question]]) -> Iterator[Outcome]:
        """Answer questions, grouped by document; an error that a user can correct becomes that of a question."""
        for number, questions in enumerate(groups):
            self._progress.documents_left = len(groups) - number
            yield from self._about_one(questions)

    def _about_one(self, questions: Sequence[Question]) -> Iterator[Outcome]:
        start = time.perf_counter()
        try:
            digest = documents_digest(questions[0].documents, self._folder)  # before they are read: a change is noticed
            chat, fields = self._chat(questions)
            with self._progress.reading(questions[0].documents[0], len(chat.token_ids)):
                chat.read()
        except (HybridCacheError, MemoryError, RuntimeError) as error:
            yield from _failed(questions, error)
            return
        fields |= {"document_digest": digest, "document_seconds": round(time.perf_counter() - start, 3)}
        left = []
        for question in questions:
            try:
                chat.require_room(question.text)
                left.append(question)
            except HybridCacheError as error:
                yield from _failed([question], error)
        at_once = self._at_once
        while left:
            try:
                for given in chat.ask_all([question.text for question in left], at_once):
                    yield left.pop(0), _fields_of(given) | fields
            except (HybridCacheError, MemoryError, RuntimeError) as error:
                yield from _failed([left.pop(0)], error)
                at_once = 1  # memory ended with a single answer

    def _chat(self, questions: Sequence[Question]) -> tuple["Chat", dict[str, Any]]:
        """A conversation about a document, which is not read yet, and the fields of an answer that describe it."""
        from ..chat import Chat, PromptError
        from ..documents import read_documents

        prompt, cache = self._options.prompt, self._options.cache
        remark = partial(note, self._notes)
        documents = read_documents(questions[0].documents, remark, self._folder)
        chat = Chat(
            self._model,
            self._tokenizer,
            documents,
            system=prompt.system,
            context=prompt.context,
            leave=self._settings.max_new_tokens + self._question_tokens(questions),
            cache=cache.name,
            bits=cache.bits,
            cpu_decode=cache.decodes_on_cpu,
            store=self._store,
            settings=self._settings,
            details={"model": self._options.model.name, "weights": self._options.model.weights},
            progress=self._progress.advance if self._notes.is_interactive else True,
            remark=remark,
        )
        read = chat.document
        if read.read_tokens < read.tokens and prompt.context is None:
            raise PromptError(
                f"The {documents.counted} {'has' if len(documents.files) == 1 else 'have'} "
                f"{'about ' if read.is_estimate else ''}{read.tokens:,} tokens, of which {read.read_tokens:,} fit into "
                f"a context of {chat.context:,} with the question and {self._settings.max_new_tokens:,} new tokens. "
                "Pass --context to read only the start, or use a model with a longer context."
            )
        fields: dict[str, Any] = {"document_tokens": read.tokens, "read_tokens": read.read_tokens}
        if len(documents.files) > 1:
            fields["documents"] = [asdict(part) for part in read.parts]
        if documents.skipped:
            fields["left_out"] = list(documents.skipped)
        return chat, fields

    def _question_tokens(self, questions: Sequence[Question]) -> int:
        """The tokens of the longest question that leaves half of the room to the document; a longer one may fail."""
        from ..chat import PromptError, context_length

        lengths = []
        for question in questions:
            with suppress(PromptError):
                lengths.append(len(self._template.conversation([question.text], document=[])))
        half = (context_length(self._model) - self._settings.max_new_tokens) // 2
        return max((length for length in lengths if length <= half), default=min(lengths, default=0))


def without_missing(groups: Sequence[list[Question]], folder: Path) -> tuple[list[Outcome], list[list[Question]]]:
    """The errors of questions about documents that are not there, before a model is loaded; and the other groups."""
    from ..documents import DocumentError, require_documents

    missing: list[Outcome] = []
    others = []
    for questions in groups:
        try:
            require_documents(questions[0].documents, folder)
            others.append(questions)
        except DocumentError as error:
            missing += _failed(questions, error)
    return missing, others


def _fields_of(answer: "Answer") -> dict[str, Any]:
    """The fields of an answer, without those that describe its document."""
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": len(answer.token_ids),
        "seconds": round(answer.seconds, 3),
        "at_once": answer.together,
    }


def _failed(questions: Sequence[Question], error: Exception) -> list[Outcome]:
    """The error as that of each question; raises an error that no user can correct."""
    reason = str(error) if isinstance(error, HybridCacheError) else out_of_memory(error)
    return [(question, {"error": reason.partition("\n")[0]}) for question in questions]
