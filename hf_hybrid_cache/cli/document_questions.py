"""All questions about one document: it is computed once, or read from a file of what was computed before."""

import copy
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..saving import CacheFileError
from .console import OUT_OF_MEMORY, UsageError, note
from .prompts import PromptError, context_length, document_prompt, following_prompt
from .questions import Answer, Question
from .terminal import is_encodable, read_text
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

    def answers(self, questions: Sequence[Question]) -> Iterator[Answer]:
        """
        One for each question, all of which are about the same document.

        What a user can put right, such as a document that is missing, is the `error` of its questions.
        """
        try:
            start = time.perf_counter()
            prefix, read = self._prefix(questions)
            cache = self._filled(Path(questions[0].document), prefix)
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
        text = read_text(self.folder / questions[0].document)
        context = self.options.context
        asked = self._longest_question(questions, room)
        prompt = document_prompt(self.tokenizer, text, asked, context or room, room, apart=True)
        if prompt.kept_tokens < prompt.document_tokens and context is None:
            raise UsageError(
                f"The document has {prompt.document_tokens:,} tokens, of which {prompt.kept_tokens:,} fit into a "
                f"context of {longest:,} with the question and {self.options.max_new_tokens:,} new tokens. Pass "
                "--context to read only the start of each document, or use a model with a longer context."
            )
        read = {"document_tokens": prompt.document_tokens, "read_tokens": prompt.kept_tokens}
        return prompt.input_ids[:, : prompt.prefix_tokens], read

    def _longest_question(self, questions: Sequence[Question], room: int) -> str:
        """Of those that leave half of the room to the document; a longer one is to fail alone."""
        lengths = {
            question.question: len(self.tokenizer(question.question, verbose=False)["input_ids"])
            for question in questions
        }
        fitting = [text for text, length in lengths.items() if length <= room // 2]
        return max(fitting, key=lengths.__getitem__) if fitting else min(lengths, key=lengths.__getitem__)

    def _filled(self, document: Path, prefix: torch.Tensor) -> HybridCache:
        """A cache that holds the tokens before a question."""
        path = self._kept_at(document, prefix)
        if path is not None and path.exists():
            try:
                return HybridCache.load(path, self.model.config, device=self.model.device, token_ids=prefix)
            except CacheFileError as error:
                note(self.notes, f"{path} is computed anew: {error}")
        options = CacheOptions() if self.options.bits is None else CacheOptions(bits=self.options.bits)
        cache = cast(HybridCache, new_cache(self.options.cache, self.model.config, options))
        timed_generate(self.model, prefix, cache, 1, self.options.prefill_chunk_size)
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
        of_answers = ("max_new_tokens", "context")
        computed = {name: value for name, value in asdict(self.options).items() if name not in of_answers}
        digest = hashlib.sha256(json.dumps([computed, str(self.model.dtype)]).encode())
        digest.update(prefix.numpy().tobytes())
        return self.kept_caches / f"{document.stem}-{digest.hexdigest()[:16]}.safetensors"

    def _answer(
        self, question: Question, prefix: torch.Tensor, cache: HybridCache, read: dict[str, Any], is_last: bool
    ) -> Answer:
        if not is_encodable(question.question):
            raise UsageError("The question is not UTF-8 text.")
        room = context_length(self.model) - self.options.max_new_tokens
        prompt = following_prompt(self.tokenizer, prefix, question.question, room)
        # What was coded cannot be taken back to the last bit, so every question has a copy of the document then.
        is_shared = not is_last and cache.is_croppable and not cache.codecs
        used = cache if is_last or is_shared else copy.deepcopy(cache)
        start = time.perf_counter()
        try:
            run = timed_generate(
                self.model, prompt.input_ids, used, self.options.max_new_tokens, self.options.prefill_chunk_size
            )
        except BaseException:
            if used is cache:
                cache.reset()  # the next question computes the document anew
            raise
        if is_shared:
            cache.crop(prefix.shape[1] - cache.get_seq_length())
        return {
            **asdict(question),
            "answer": str(self.tokenizer.decode(run.tokens, skip_special_tokens=True)).strip(),
            "prompt_tokens": prompt.input_ids.shape[1],
            "answer_tokens": len(run.tokens),
            "seconds": round(time.perf_counter() - start, 3),
            **read,
        }


def _failed(question: Question, error: Exception) -> Answer:
    if isinstance(error, RuntimeError) and not any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY):
        raise error
    return {**asdict(question), "error": next(iter(str(error).splitlines()), "") or type(error).__name__}
