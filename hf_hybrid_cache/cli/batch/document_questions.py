"""All questions about one document, which is read once, or taken from a store."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache import HybridCache
from ...errors import HybridCacheError
from ..console import UsageError, note, out_of_memory
from ..documents.document_budgets import document_budgets
from ..documents.documents import Documents, read_documents
from ..runs.answer_options import AnswerOptions
from ..runs.finish_reason import finish_reason
from ..runs.prompt_store import PromptStore, title_of
from ..runs.prompts import PromptError, context_length, document_prompt
from ..runs.timed_run import CacheOptions, generate_rows, new_cache, timed_generate
from .answers import Answer
from .at_once import QuestionsAtOnce
from .batch_options import BatchOptions
from .batch_progress import BatchProgress
from .digests import documents_digest, model_digest
from .following_questions import FollowingQuestion, number_together, prompts_together
from .questions import Question, by_document


@dataclass(frozen=True)
class DocumentQuestions:
    """
    Answers questions about one document after the other.

    Attributes:
        model: answers.
        tokenizer: of the model.
        options: how questions are answered.
        at_once: how many of them together.
        folder: names of documents are relative to it.
        store: documents are looked for in it, and kept there; `None` for no store.
        notes: receives remarks.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: BatchOptions
    at_once: QuestionsAtOnce
    folder: Path
    store: PromptStore | None
    notes: Console

    def answers(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """
        Answer all questions about a document, then all about the next one.

        An error that a user can correct, such as a missing document, becomes the `error` of its questions.
        """
        made_with = {"model_digest": model_digest(self.options.model.name), "settings": self.options.settings()}
        for about_one in by_document(questions):
            for answer in self._about_one(about_one, progress):
                yield {**answer, **made_with}

    def _about_one(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """Answer all questions about one document."""
        try:
            start = time.perf_counter()
            digest = documents_digest(questions[0].documents, self.folder)  # before they are read: a change is noticed
            documents = read_documents(questions[0].documents, partial(note, self.notes), self.folder)
            prefix, read = self._prefix(documents, questions)
            fill = partial(self._filled, questions[0].documents[0], documents, prefix, progress)
            cache = fill()
            read["document_digest"] = digest
            read["document_seconds"] = round(time.perf_counter() - start, 3)
        except (HybridCacheError, MemoryError, RuntimeError) as error:
            for question in questions:
                yield _failed(question, error)
            return
        following: list[FollowingQuestion] = []
        for question in questions:
            try:
                following.append(FollowingQuestion.after(prefix, question, self.model, self.tokenizer))
            except PromptError as error:
                yield _failed(question, error)
        yield from self._answered(following, prefix, cache, fill, read, progress)

    def _answered(
        self,
        following: Sequence[FollowingQuestion],
        prefix: torch.Tensor,
        cache: HybridCache | None,
        fill: Callable[[], HybridCache],
        read: dict[str, Any],
        progress: BatchProgress,
    ) -> Iterator[Answer]:
        """Answer questions, as many together as asked for, or as memory has room for."""
        assert cache is not None
        at_once, max_new_tokens = self.at_once.most(following, cache), self.options.answer.max_new_tokens
        while following:
            number = number_together(following, at_once, max_new_tokens)
            together, others = following[:number], following[number:]
            try:
                if cache is None:
                    cache = fill()
                with progress.answering(number, max_new_tokens) as advance:
                    answers = self._answers(together, prefix, cache, read, not others, advance)
            except (MemoryError, RuntimeError) as error:
                reason = out_of_memory(error)
                if cache is not None:
                    cache.reset()  # others hold it, too
                cache = None  # codecs that it has chosen would stay
                answers = [{**each.question.fields, "error": reason} for each in together]
                if number > 1:
                    at_once = number // 2
                    note(self.notes, f"memory ends with {number} questions at once, going on with {at_once}: {reason}")
                    continue
            yield from answers
            following = others

    def _prefix(self, documents: Documents, questions: Sequence[Question]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tokens before a question, `[1, tokens]`, and the fields of an answer that describe the document."""
        longest, max_new_tokens = context_length(self.model), self.options.answer.max_new_tokens
        room = longest - max_new_tokens
        if room < 1:
            raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room in a context of {longest:,} tokens.")
        context = self.options.context
        asked = self._longest_question(questions, room)
        prompt = document_prompt(
            self.tokenizer, documents.text, asked, context or room, room, True, self.options.system
        )
        if prompt.kept_tokens < prompt.document_tokens and context is None:
            whole = f"The {documents.counted} {'has' if len(documents.files) == 1 else 'have'}"
            raise UsageError(
                f"{whole} {prompt.document_tokens:,} tokens, of which {prompt.kept_tokens:,} fit into a context of "
                f"{longest:,} with the question and {max_new_tokens:,} new tokens. Pass --context to read "
                "only the start, or use a model with a longer context."
            )
        read: dict[str, Any] = {"document_tokens": prompt.document_tokens, "read_tokens": prompt.kept_tokens}
        if len(documents.files) > 1:
            budgets = document_budgets(documents, self.tokenizer, prompt.kept_tokens)
            read["documents"] = [asdict(budget) for budget in budgets]
        if documents.skipped:
            read["left_out"] = documents.skipped
        return prompt.input_ids[:, : prompt.prefix_tokens], read

    def _longest_question(self, questions: Sequence[Question], room: int) -> str:
        """The longest question that leaves half of the room to the document; a longer one may fail alone."""
        lengths = {
            question.question: len(self.tokenizer(question.question, verbose=False)["input_ids"])
            for question in questions
        }
        fitting = [text for text, length in lengths.items() if length <= room // 2]
        return max(fitting, key=lengths.__getitem__) if fitting else min(lengths, key=lengths.__getitem__)

    def _filled(
        self, document: str, documents: Documents, prefix: torch.Tensor, progress: BatchProgress
    ) -> HybridCache:
        """Fill a cache with the tokens before a question."""
        cache_options = CacheOptions(bits=self.options.cache_bits)
        cache = cast(HybridCache, new_cache(self.options.cache, self.model.config, cache_options))
        length = prefix.shape[1]
        with progress.reading(document, length) as bar:
            if self.store is None:
                one_token = AnswerOptions(1, prefill_chunk_size=self.options.answer.prefill_chunk_size)
                timed_generate(self.model, prefix, cache, one_token, on_prefill=bar.advance)
            else:
                self.store.fill(self.model, prefix, cache, length, title_of(documents.title), bar)
        return cache

    def _answers(
        self,
        together: Sequence[FollowingQuestion],
        prefix: torch.Tensor,
        cache: HybridCache,
        read: dict[str, Any],
        is_last: bool,
        advance: Callable[[int], None],
    ) -> list[Answer]:
        """Answer questions together; the cache goes back to the document unless these are the last ones."""
        limit = self.options.answer.max_new_tokens
        options = replace(self.options.answer, max_new_tokens=min(limit, together[0].room))
        start = time.perf_counter()
        if not is_last:
            cache.checkpoint()
        rows = generate_rows(self.model, *prompts_together(prefix, together), cache, options, advance)
        if not is_last:
            cache.go_back(prefix.shape[1])
            if len(together) > 1:
                cache.batch_select_indices(torch.tensor([0]))
        seconds = round(time.perf_counter() - start, 3)
        return [
            {
                **each.question.fields,
                "answer": str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
                "finish_reason": finish_reason(self.model, tokens, limit, each.room),
                "prompt_tokens": prefix.shape[1] + len(each.token_ids),
                "answer_tokens": len(tokens),
                "seconds": seconds,
                "at_once": len(together),
                **read,
            }
            for each, tokens in zip(together, rows, strict=True)
        ]


def _failed(question: Question, error: Exception) -> Answer:
    """The answer that records an error; raises errors that are our own."""
    reason = str(error) if isinstance(error, HybridCacheError) else out_of_memory(error)
    return {**question.fields, "error": reason.partition("\n")[0]}
