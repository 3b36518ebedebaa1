"""The prompt of `generate`, answered with any of the caches."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...cache import HybridCache
from ..console import UsageError, note
from ..loading import quantize_loaded
from ..runs.answer_options import AnswerOptions
from ..runs.finish_reason import FinishReason, finish_reason
from ..runs.prompt_store import PromptStore
from ..runs.prompts import Prompt, context_length
from ..runs.shown_run import shown_fill, shown_run
from ..runs.timed_run import CacheOptions, Run, new_cache, warm_up
from .comparison import FEW_WEIGHT_BITS, mebibytes


@dataclass(frozen=True)
class GenerateTask:
    """
    One prompt for one model; each run has a new cache unless one is given.

    Attributes:
        model: answers.
        prompt: what it is asked.
        cache_options: of every new cache.
        answer: how the answer is generated.
        notes: receives remarks, and shows a bar on a terminal.
        store: fills new caches; `None` for no store.
        title: of the prompt in the store.
    """

    model: PreTrainedModel
    prompt: Prompt
    cache_options: CacheOptions
    answer: AnswerOptions
    notes: Console
    store: PromptStore | None = None
    title: str = ""

    def run(self, name: str, on_token: Callable[[int], None] | None = None, cache: Cache | None = None) -> Run:
        """Generate an answer with a cache, a new one of that name unless it is given."""
        cache = cache or self._new_cache(name)
        input_ids, fill = self.prompt.input_ids, None
        if self.store is not None:
            fill = partial(self.store.fill, self.model, input_ids, cache, self.prompt.prefix_tokens, self.title)
        return shown_run(self.notes, f"{name}: prefill", self.model, input_ids, cache, self.answer, on_token, fill)

    def keep(self, name: str) -> None:
        """Read the document into a new cache, from the store or into it."""
        assert self.store is not None
        length = self._prefix.shape[1]
        fill = partial(self.store.fill, self.model, self._prefix, self._new_cache(name), length, self.title)
        seconds = shown_fill(self.notes, f"{name}: document", length, fill)
        note(self.notes, f"document: {length:,} tokens are kept in {self.store.prompts.path} after {seconds:.2f} s")

    def save(self, name: str, path: Path) -> HybridCache:
        """Read the document into a new cache, which is saved and returned."""
        cache = self._new_cache(name)
        assert isinstance(cache, HybridCache)
        one_token = replace(self.answer, max_new_tokens=1)
        run = shown_run(self.notes, f"{name}: document", self.model, self._prefix, cache, one_token)
        start = time.perf_counter()
        cache.save(path, self._prefix, self._prefix.shape[1])
        seconds = time.perf_counter() - start
        size = mebibytes(path.stat().st_size)
        note(self.notes, f"document: prefill {run.prefill_seconds:.2f} s; {size} written to {path} in {seconds:.2f} s")
        return cache

    def load(self, path: Path) -> HybridCache:
        """
        Load the cache that `save` wrote.

        Raises:
            CacheFileError: it holds another document, or is of another model.
        """
        start = time.perf_counter()
        cache = HybridCache.load(
            path,
            self.model.config,
            device=self.model.device,
            token_ids=self._prefix,
            group=self.cache_options.group,
            selection=self.cache_options.selection,
        )
        seconds = time.perf_counter() - start
        unread = self.prompt.num_tokens - cache.get_seq_length()
        note(self.notes, f"document: read from {path} in {seconds:.2f} s; {unread:,} tokens of the prompt are left")
        return cache

    def warm_up(self, name: str) -> None:
        """Run two steps with a new cache, so that no answer's time includes what is compiled once."""
        warm_up(self.model, self.prompt.input_ids, self._new_cache(name))

    def run_with_few_bits(self, name: str) -> Run | None:
        """Quantize the model's weights for good, and generate; `None` if none of them can be quantized."""
        try:
            quantize_loaded(self.model, FEW_WEIGHT_BITS, self.notes)
        except UsageError as error:
            note(self.notes, str(error))
            return None
        self.warm_up(name)
        return self.run(name)

    def finish_reason(self, run: Run) -> FinishReason:
        """The reason why the answer of a run ended."""
        room = context_length(self.model) - self.prompt.num_tokens
        return finish_reason(self.model, run.tokens, self.answer.max_new_tokens, room)

    @property
    def _prefix(self) -> torch.Tensor:
        """`[1, tokens]`, the prompt before the question."""
        return self.prompt.input_ids[:, : self.prompt.prefix_tokens]

    def _new_cache(self, name: str) -> Cache:
        return new_cache(name, self.model.config, self.cache_options)
