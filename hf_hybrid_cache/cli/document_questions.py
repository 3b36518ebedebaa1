"""All questions about one document: it is computed once, or read from a file of what was computed before."""

import copy
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..saving import CacheFileError
from .answers import Answer
from .batch_progress import BatchProgress
from .console import OUT_OF_MEMORY, UsageError, note
from .document_shares import shares_of
from .documents import read_documents
from .finish_reason import finish_reason
from .prompts import PromptError, context_length, document_prompt, question_tokens
from .questions import Question, by_document
from .sampling import Sampling
from .timed_run import CacheOptions, new_cache, timed_generate


@dataclass(frozen=True)
class BatchOptions:
    """
    How questions are answered, the same for all in a file of answers.

    Attributes:
        model: as `--model` names it.
        cache: one of `CACHES`.
        bits: of keys and values; `None` for those of the cache.
        weights: bits of weights; `None` as they are.
        experts: where experts are; `None` where the model is.
        expert_bits: of those; `None` as they are.
        dtype: of the model; `None` for its own.
        max_new_tokens: of an answer at most.
        context: tokens of a document that are read; `None` for all.
        prefill_chunk_size: tokens of a prompt per forward pass.
        system: message to the model before the document; `None` for that of its template.
        sampling: how tokens are chosen.
    """

    model: str
    cache: str
    bits: int | None
    weights: int | None
    experts: str | None
    expert_bits: int | None
    dtype: str | None
    max_new_tokens: int
    context: int | None
    prefill_chunk_size: int
    system: str | None
    sampling: Sampling


@dataclass(frozen=True)
class DocumentQuestions:
    """
    Answers questions about one document after the other.

    Args:
        model: answers.
        tokenizer: of the model.
        options: how.
        folder: that documents' names are relative to.
        kept_caches: a folder for documents that were computed, for the next run; `None` keeps none.
        notes: where remarks go.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: BatchOptions
    folder: Path
    kept_caches: Path | None
    notes: Console

    def answers(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """
        One for each question, as they come: all about a document, then all about the next one.

        What a user can put right, such as a document that is missing, is the `error` of its questions.
        """
        settings = asdict(self.options)
        for about_one in by_document(questions):
            for answer in self._about_one(about_one, progress):
                yield {**answer, "settings": settings}

    def _about_one(self, questions: Sequence[Question], progress: BatchProgress) -> Iterator[Answer]:
        """To all questions about a document."""
        try:
            start = time.perf_counter()
            prefix, read = self._prefix(questions)
            cache = self._filled(questions[0].documents[0], prefix, progress)
            read["document_seconds"] = round(time.perf_counter() - start, 3)
        except (UsageError, PromptError, MemoryError, RuntimeError) as error:
            for question in questions:
                yield _failed(question, error)
            return
        for number, question in enumerate(questions, 1):
            try:
                yield self._answer(question, prefix, cache, read, is_last=number == len(questions))
            except (UsageError, PromptError, MemoryError, RuntimeError) as error:
                yield _failed(question, error)

    def _prefix(self, questions: Sequence[Question]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tokens before a question, `[1, tokens]`, and what is said of them."""
        longest = context_length(self.model)
        room = longest - self.options.max_new_tokens
        if room < 1:
            raise UsageError(
                f"--max-new-tokens {self.options.max_new_tokens:,} leaves no room in a context of {longest:,} tokens."
            )
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
                f"{longest:,} with the question and {self.options.max_new_tokens:,} new tokens. Pass --context to read "
                "only the start, or use a model with a longer context."
            )
        read: dict[str, Any] = {"document_tokens": prompt.document_tokens, "read_tokens": prompt.kept_tokens}
        if len(documents.files) > 1:
            read["documents"] = [asdict(each) for each in shares_of(documents, self.tokenizer, prompt.kept_tokens)]
        if documents.left_out:
            read["left_out"] = documents.left_out
        return prompt.input_ids[:, : prompt.prefix_tokens], read

    def _longest_question(self, questions: Sequence[Question], room: int) -> str:
        """Of those that leave half of the room to the document; a longer one is to fail alone."""
        lengths = {
            question.question: len(self.tokenizer(question.question, verbose=False)["input_ids"])
            for question in questions
        }
        fitting = [text for text, length in lengths.items() if length <= room // 2]
        return max(fitting, key=lengths.__getitem__) if fitting else min(lengths, key=lengths.__getitem__)

    def _filled(self, document: str, prefix: torch.Tensor, progress: BatchProgress) -> HybridCache:
        """A cache that holds the tokens before a question."""
        path = self._kept_at(Path(document), prefix)
        if path is not None and path.exists():
            try:
                return HybridCache.load(path, self.model.config, device=self.model.device, token_ids=prefix)
            except CacheFileError as error:
                note(self.notes, f"{path} is computed anew: {error}")
        options = CacheOptions() if self.options.bits is None else CacheOptions(bits=self.options.bits)
        cache = cast(HybridCache, new_cache(self.options.cache, self.model.config, options))
        with progress.reading(document, prefix.shape[1]) as advance:
            timed_generate(self.model, prefix, cache, 1, self.options.prefill_chunk_size, on_prefill=advance)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                cache.save(path, prefix)
            except (OSError, CacheFileError) as error:
                note(self.notes, f"{path} is not kept: {error}")
        return cache

    def _kept_at(self, document: Path, prefix: torch.Tensor) -> Path | None:
        """Where this document is kept, as this model and this cache compute it."""
        if self.kept_caches is None:
            return None
        of_answers = ("max_new_tokens", "context", "system", "sampling")
        computed = {name: value for name, value in asdict(self.options).items() if name not in of_answers}
        digest = hashlib.sha256(json.dumps([computed, str(self.model.dtype)]).encode())
        digest.update(prefix.numpy().tobytes())
        return self.kept_caches / f"{document.stem or 'documents'}-{digest.hexdigest()[:16]}.safetensors"

    def _answer(
        self, question: Question, prefix: torch.Tensor, cache: HybridCache, read: dict[str, Any], is_last: bool
    ) -> Answer:
        asked = question_tokens(self.tokenizer, prefix[0].tolist(), question.question)
        input_ids = torch.cat([prefix, torch.tensor([asked])], dim=1)
        longest = context_length(self.model)
        room = longest - input_ids.shape[1]
        if room < 1:
            raise PromptError(
                f"The document takes {prefix.shape[1]:,} tokens, the question {len(asked):,}, and the model's context "
                f"is {longest:,}: no room is left for an answer. Ask a shorter question."
            )
        limit = self.options.max_new_tokens
        # What was coded cannot be taken back to the last bit, so every question has a copy of the document then.
        is_shared = not is_last and cache.is_croppable and not cache.codecs
        used = cache if is_last or is_shared else copy.deepcopy(cache)
        start = time.perf_counter()
        try:
            run = timed_generate(
                self.model,
                input_ids,
                used,
                min(limit, room),
                self.options.prefill_chunk_size,
                sampling=self.options.sampling,
            )
        except BaseException:
            if used is cache:
                cache.reset()  # the next question computes the document anew
            raise
        if is_shared:
            cache.crop(prefix.shape[1] - cache.get_seq_length())
        return {
            **question.fields,
            "answer": str(self.tokenizer.decode(run.tokens, skip_special_tokens=True)).strip(),
            "finish_reason": finish_reason(self.model, run.tokens, limit, room),
            "prompt_tokens": input_ids.shape[1],
            "answer_tokens": len(run.tokens),
            "seconds": round(time.perf_counter() - start, 3),
            **read,
        }


def _failed(question: Question, error: Exception) -> Answer:
    if isinstance(error, RuntimeError) and not any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY):
        raise error
    return {**question.fields, "error": next(iter(str(error).splitlines()), "") or type(error).__name__}
