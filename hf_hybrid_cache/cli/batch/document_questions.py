"""All questions about one document, which is read once, or loaded from the file of its cache."""

import copy
import hashlib
import json
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
from ...saving import CacheFileError
from ..console import OUT_OF_MEMORY, UsageError, note
from ..documents.document_budgets import document_budgets
from ..documents.documents import read_documents
from ..runs.answer_options import AnswerOptions
from ..runs.finish_reason import finish_reason
from ..runs.going_back import can_go_back
from ..runs.prompts import PromptError, context_length, document_prompt
from ..runs.timed_run import CacheOptions, generate_rows, new_cache, timed_generate
from .answers import Answer
from .at_once import QuestionsAtOnce
from .batch_options import BatchOptions
from .batch_progress import BatchProgress
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
        kept_caches: a folder for the caches of documents, for the next run; `None` keeps none.
        notes: receives remarks.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: BatchOptions
    at_once: QuestionsAtOnce
    folder: Path
    kept_caches: Path | None
    notes: Console

    def answers(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """
        Answer all questions about a document, then all about the next one.

        An error that a user can correct, such as a missing document, becomes the `error` of its questions.
        """
        settings = self.options.settings()
        for about_one in by_document(questions):
            for answer in self._about_one(about_one, progress):
                yield {**answer, "settings": settings}

    def _about_one(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """Answer all questions about one document."""
        try:
            start = time.perf_counter()
            prefix, read = self._prefix(questions)
            cache = self._filled(questions[0].documents[0], prefix, progress)
            read["document_seconds"] = round(time.perf_counter() - start, 3)
        except (UsageError, PromptError, MemoryError, RuntimeError) as error:
            for question in questions:
                yield _failed(question, error)
            return
        following: list[FollowingQuestion] = []
        for question in questions:
            try:
                following.append(FollowingQuestion.after(prefix, question, self.model, self.tokenizer))
            except PromptError as error:
                yield _failed(question, error)
        yield from self._answered(following, prefix, cache, read, progress)

    def _answered(
        self,
        following: Sequence[FollowingQuestion],
        prefix: torch.Tensor,
        cache: HybridCache,
        read: dict[str, Any],
        progress: BatchProgress,
    ) -> Iterator[Answer]:
        """Answer questions, as many together as asked for, or as memory has room for."""
        at_once, max_new_tokens = self.at_once.most(following, cache), self.options.answer.max_new_tokens
        while following:
            number = number_together(following, at_once, max_new_tokens)
            together, others = following[:number], following[number:]
            try:
                with progress.answering(number, max_new_tokens) as advance:
                    answers = self._answers(together, prefix, cache, read, not others, advance)
            except (MemoryError, RuntimeError) as error:
                answers = [_failed(each.question, error) for each in together]
                if number > 1:
                    at_once = number // 2
                    reason = answers[0]["error"]
                    note(self.notes, f"memory ends with {number} questions at once, going on with {at_once}: {reason}")
                    continue
            yield from answers
            following = others

    def _prefix(self, questions: Sequence[Question]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tokens before a question, `[1, tokens]`, and the fields of an answer that describe the document."""
        longest, max_new_tokens = context_length(self.model), self.options.answer.max_new_tokens
        room = longest - max_new_tokens
        if room < 1:
            raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room in a context of {longest:,} tokens.")
        documents = read_documents(questions[0].documents, partial(note, self.notes), self.folder)
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

    def _filled(self, document: str, prefix: torch.Tensor, progress: BatchProgress) -> HybridCache:
        """Load or compute a cache of the tokens before a question."""
        path = self._kept_at(Path(document), prefix)
        if path is not None and path.exists():
            try:
                return HybridCache.load(path, self.model.config, device=self.model.device, token_ids=prefix)
            except CacheFileError as error:
                note(self.notes, f"{path} is computed anew: {error}")
        cache_options = CacheOptions(bits=self.options.cache_bits)
        cache = cast(HybridCache, new_cache(self.options.cache, self.model.config, cache_options))
        one_token = AnswerOptions(1, prefill_chunk_size=self.options.answer.prefill_chunk_size)
        with progress.reading(document, prefix.shape[1]) as advance:
            timed_generate(self.model, prefix, cache, one_token, on_prefill=advance)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                cache.save(path, prefix, prefix.shape[1])
            except (OSError, CacheFileError) as error:
                note(self.notes, f"{path} is not kept: {error}")
        return cache

    def _kept_at(self, document: Path, prefix: torch.Tensor) -> Path | None:
        """The file of this document's cache, as this model and these settings compute it."""
        if self.kept_caches is None:
            return None
        digest = hashlib.sha256(json.dumps([self.options.cache_settings(), str(self.model.dtype)]).encode())
        digest.update(prefix.numpy().tobytes())
        return self.kept_caches / f"{document.stem or 'documents'}-{digest.hexdigest()[:16]}.safetensors"

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
        # A quantized cache cannot be cropped without rounding again, so it is copied before each answer.
        is_shared = not is_last and can_go_back(cache) and not cache.codecs
        used = cache if is_last or is_shared else copy.deepcopy(cache)
        start = time.perf_counter()
        try:
            rows = generate_rows(self.model, *prompts_together(prefix, together), used, options, advance)
        except BaseException:
            if used is cache:
                cache.reset()  # the next question computes the document anew
            raise
        if is_shared:
            cache.crop(prefix.shape[1] - cache.get_seq_length())
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
    if isinstance(error, RuntimeError) and not any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY):
        raise error
    return {**question.fields, "error": next(iter(str(error).splitlines()), "") or type(error).__name__}
