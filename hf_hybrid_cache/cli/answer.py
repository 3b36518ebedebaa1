"""`hf-hybrid-cache generate`: a question about a long document, with any of the caches."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import HybridCache
from ..layers import Selection
from ..saving import require_place
from .answer_record import print_json, record
from .choices import COMPARED_TOKENS, DEFAULT_QUESTION, NEW_TOKENS, RANDOM_TOKENS
from .coded_weights import code_weights
from .comparison import FEW_WEIGHT_BITS, WITH_WEIGHTS, conclusion, mebibytes, one_line, summary, table
from .console import UsageError, check_bits, check_choice, dtype_of, exit_codes, note
from .device import compile_kernels, loaded
from .document_shares import shares_of, what_was_left_out
from .documents import read_documents
from .files import STANDARD_INPUT, read_text
from .finish_reason import FinishReason, finish_reason
from .group import consoles, joined
from .prompts import (
    Prompt,
    context_length,
    default_document,
    document_prompt,
    following_prompt,
    random_prompt,
    verbatim_prompt,
    where_it_says_so,
)
from .ranks import num_processes
from .replaced_file import what_is_replaced
from .sampling import GREEDY, Sampling
from .saved_document import document_ids
from .shown_run import shown_run
from .terminal import TokenStream, is_encodable, write
from .timed_run import CACHES, SHAREABLE, CacheOptions, Run, new_cache, warm_up
from .weight_options import WeightOptions


def answer(
    *,
    document: Sequence[str],
    question: str | None,
    prompt_file: Path | None,
    model: str,
    cache: str | None,
    compare: bool,
    save_cache: Path | None,
    force: bool,
    load_cache: Path | None,
    max_new_tokens: int | None,
    context: int | None,
    prefill_chunk_size: int,
    prefetch_layers: int | None,
    resident_layers: int | None,
    device_tokens: int | None,
    cpu_decode: str | None,
    bits: int | None,
    mass: float | None,
    weights: int | None,
    experts: str | None,
    expert_bits: int | None,
    system: str | None,
    temperature: float,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
    as_json: bool,
    quiet: bool,
    dtype: str | None,
    device: str | None,
) -> None:
    """Do what `generate` says with these options."""
    out, notes = consoles(quiet)
    text_out = Console(quiet=True) if as_json else out
    with exit_codes(notes):
        _check_files(save_cache, load_cache, cache, compare, prompt_file)
        replaced = _replaced(save_cache, force)
        if cache is not None:
            check_choice("--cache", cache, CACHES)
        check_bits(bits)
        weight_options = WeightOptions(weights, experts, expert_bits)
        sampling = Sampling(temperature, top_p, repetition_penalty, seed)
        if compare and sampling != GREEDY:
            raise UsageError("--compare takes the likeliest token each time: drop the options for sampling.")
        if as_json and save_cache and question is None:
            raise UsageError("--json is of an answer: ask something with --question, or drop it.")
        max_new_tokens = max_new_tokens or (COMPARED_TOKENS if compare else NEW_TOKENS)
        of_offloaded = prefetch_layers, resident_layers, device_tokens
        in_parts = cpu_decode not in (None, "yes", "no")
        name = cache or _default_cache(bits, in_parts or any(value is not None for value in of_offloaded))
        if num_processes() > 1:
            _check_shareable(name, compare, document)
        of_caches = {
            "bits": bits,
            "prefetch_layers": prefetch_layers,
            "resident_layers": resident_layers,
            "device_tokens": device_tokens,
            "cpu_decode": None if cpu_decode is None else _cpu_decode_of(cpu_decode, name, compare),
        }
        given: dict[str, Any] = {field: value for field, value in of_caches.items() if value is not None}
        _check_cache_options(given, name, cache, compare, load_cache)
        selection = None if mass is None else _selection_of(mass, name, compare)
        precision = dtype_of(dtype)
        if prompt_file and (document or question is not None):
            raise UsageError("--prompt-file is the whole prompt: drop it, or --document and --question.")
        if prompt_file and context is not None:
            raise UsageError("--prompt-file is used as it is: drop --context, or pass the text as --document.")
        if question is None and load_cache:
            raise UsageError("Ask something about the saved document: --question.")
        if question is None and document and not save_cache:
            raise UsageError("Ask something about the document: --question. --save-cache keeps it for later questions.")
        if system is not None and (prompt_file or load_cache):
            which = "--prompt-file is used as it is" if prompt_file else "--load-cache gives what comes before"
            raise UsageError(f"{which}: drop --system.")
        if question is not None and not question.strip():
            raise UsageError("--question is empty.")
        if question is not None and not is_encodable(question):
            raise UsageError(f"--question {question!r} is not UTF-8 text.")
        documents = read_documents(document, partial(note, notes)) if document else None
        text = None if documents is None else documents.text
        if prompt_file:
            text = read_text(prompt_file)
        saved_ids = document_ids(load_cache) if load_cache and text is None else None
        if replaced is not None:
            note(notes, f"{save_cache} will take the place of {replaced}")
        ready = loaded(model, precision, device, weight_options, notes)
        language_model, tokenizer = ready.model, ready.tokenizer
        longest = context_length(language_model)
        kind = str(language_model.dtype).removeprefix("torch.")
        note(notes, f"model: {kind} on {language_model.device}, context of {longest:,} tokens")
        room = longest - max_new_tokens
        if room < 1:
            raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room in a context of {longest:,} tokens.")
        if tokenizer is None:
            if text is not None or question is not None or save_cache or load_cache:
                raise UsageError(f"{model} has no tokenizer: it takes no text, only the random tokens it gets without.")
            prompt = random_prompt(language_model, min(context or RANDOM_TOKENS, room))
            note(notes, f"prompt: {prompt.input_ids.shape[1]:,} random tokens")
        elif prompt_file and text is not None:
            prompt = verbatim_prompt(tokenizer, text, room)
            note(notes, f"prompt: {prompt.input_ids.shape[1]:,} tokens")
        elif saved_ids is not None:
            prompt = following_prompt(tokenizer, saved_ids, question or DEFAULT_QUESTION, room)
            note(
                notes, f"prompt: {prompt.input_ids.shape[1]:,} tokens, {prompt.prefix_tokens:,} of them in {load_cache}"
            )
        else:
            is_apart = bool(save_cache or load_cache)
            prompt = document_prompt(
                tokenizer,
                text or default_document(),
                question or DEFAULT_QUESTION,
                context or room,
                room,
                is_apart,
                system,
            )
            kept = f"kept {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
            which = "document" if documents is None else documents.counted
            note(notes, f"{which}: {kept}; prompt: {prompt.input_ids.shape[1]:,} tokens")
            if documents is not None and prompt.kept_tokens < prompt.document_tokens:
                shares = shares_of(documents, tokenizer, prompt.kept_tokens)
                write(text_out, what_was_left_out(prompt, longest, context, shares))

        group = joined()
        if group is not None:
            note(notes, f"{group.size()} processes keep a share of the cache each")
        if name != "stock" or compare:
            compile_kernels(language_model, name == "quantized" or compare, notes)
        cache_options = CacheOptions(**given, group=group, selection=selection)
        task = _Task(language_model, prompt, cache_options, max_new_tokens, prefill_chunk_size, sampling, notes)
        stream = TokenStream(text_out, tokenizer)
        if not compare:
            filled = None
            if load_cache:
                filled, name = task.load(load_cache), f"{load_cache}"
            elif save_cache:
                filled = task.save(name, save_cache)
                if question is None:
                    return
            run = task.run(name, stream.put, filled)
            stream.end()
            reason = task.finish_reason(run)
            if as_json:
                print_json(out, {"cache": name} | record(run, prompt, tokenizer, reason))
            elif reason == "length":
                note(notes, f"ended at --max-new-tokens {max_new_tokens:,}, which may be raised")
            note(notes, summary(name, run, ready.weights_said))
            return
        runs = {}
        for name in CACHES:
            task.warm_up(name)
            runs[name] = task.run(name)
            if name == "stock":
                for token in runs[name].tokens:  # only now: writing while it runs would be timed
                    stream.put(token)
                stream.end()
                if question is None and text is None and tokenizer is not None:
                    said = where_it_says_so(str(tokenizer.decode(prompt.input_ids[0])))
                    write(text_out, f"\nThe document says: {said}\n" if said else "")
        if ready.weights_said is None and language_model.device.type == "cpu":
            few_bits = task.run_with_few_bits("quantized")
            runs |= {} if few_bits is None else {WITH_WEIGHTS: few_bits}
        if as_json:
            for name, run in runs.items():
                print_json(out, {"cache": one_line(name)} | record(run, prompt, tokenizer, task.finish_reason(run)))
            return
        out.print(table(runs))
        write(out, conclusion(runs, prompt.input_ids.shape[1], kind))
        for name, run in runs.items():
            if tokenizer is not None and run.first_difference(runs["stock"]) is not None:
                answered = tokenizer.decode(run.tokens, skip_special_tokens=True)
                write(out, f"\n{one_line(name)} answers: {answered}\n")


@dataclass(frozen=True)
class _Task:
    """One prompt for one model, to be run with any cache, each time a new one unless one is given."""

    model: PreTrainedModel
    prompt: Prompt
    options: CacheOptions
    max_new_tokens: int
    prefill_chunk_size: int
    sampling: Sampling
    notes: Console

    def warm_up(self, name: str) -> None:
        warm_up(self.model, self.prompt.input_ids, new_cache(name, self.model.config, self.options))

    @property
    def _prefix(self) -> torch.Tensor:
        return self.prompt.input_ids[:, : self.prompt.prefix_tokens]

    def save(self, name: str, path: Path) -> HybridCache:
        """A cache that holds what is before the question, which `path` then does too."""
        cache = new_cache(name, self.model.config, self.options)
        assert isinstance(cache, HybridCache)
        run = self._generate(f"{name}: document", self._prefix, cache, 1)
        start = time.perf_counter()
        cache.save(path, self._prefix)
        seconds = time.perf_counter() - start
        size = mebibytes(path.stat().st_size)
        note(self.notes, f"document: prefill {run.prefill_seconds:.2f} s; {size} written to {path} in {seconds:.2f} s")
        return cache

    def load(self, path: Path) -> HybridCache:
        """The cache that `save` wrote, if it is of what is before the question."""
        start = time.perf_counter()
        cache = HybridCache.load(
            path,
            self.model.config,
            device=self.model.device,
            token_ids=self._prefix,
            group=self.options.group,
            selection=self.options.selection,
        )
        seconds = time.perf_counter() - start
        left = self.prompt.input_ids.shape[1] - cache.get_seq_length()
        note(self.notes, f"document: read from {path} in {seconds:.2f} s; {left:,} tokens of the prompt are left")
        return cache

    def run(self, name: str, on_token: Callable[[int], None] | None = None, cache: Cache | None = None) -> Run:
        """Generate once; on a terminal a bar shows the prefill."""
        cache = cache or new_cache(name, self.model.config, self.options)
        return self._generate(f"{name}: prefill", self.prompt.input_ids, cache, self.max_new_tokens, on_token)

    def finish_reason(self, run: Run) -> FinishReason:
        room = context_length(self.model) - self.prompt.input_ids.shape[1]
        return finish_reason(self.model, run.tokens, self.max_new_tokens, room)

    def run_with_few_bits(self, name: str) -> Run | None:
        """The last run: the model's weights have few bits from now on. `None` if none of them can."""
        try:
            code_weights(self.model, FEW_WEIGHT_BITS, self.notes)
        except UsageError as error:
            note(self.notes, str(error))
            return None
        self.warm_up(name)
        return self.run(name)

    def _generate(
        self,
        title: str,
        input_ids: torch.Tensor,
        cache: Cache,
        max_new_tokens: int,
        on_token: Callable[[int], None] | None = None,
    ) -> Run:
        return shown_run(
            self.notes,
            title,
            self.model,
            input_ids,
            cache,
            max_new_tokens,
            self.prefill_chunk_size,
            on_token,
            self.sampling,
        )


def _default_cache(bits: int | None, is_offloaded: bool) -> str:
    """The one that the options are for."""
    if bits is not None:
        return "quantized"
    return "offloaded" if is_offloaded else "dynamic"


def _selection_of(mass: float, name: str, compare: bool) -> Selection:
    """What `--mass` asks for."""
    if compare:
        raise UsageError("--compare is of caches that read all: drop --mass.")
    if name == "stock":
        raise UsageError("--cache stock is transformers' own, which reads all: drop --mass, or --cache.")
    if num_processes() > 1:
        raise UsageError("--mass is for one process: start it without torchrun.")
    try:
        return Selection(mass)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _check_shareable(name: str, compare: bool, document: Collection[str]) -> None:
    """Refuse what several processes cannot do together."""
    if compare:
        raise UsageError("--compare is for one process: start it without torchrun.")
    if name not in SHAREABLE:
        raise UsageError(f"--cache {name} is for one process: with torchrun use one of {', '.join(SHAREABLE)}.")
    if STANDARD_INPUT in document:
        raise UsageError("Standard input is read by one process: with torchrun give the name of a file to --document.")


def _check_files(
    save_cache: Path | None, load_cache: Path | None, cache: str | None, compare: bool, prompt_file: Path | None
) -> None:
    option = "--save-cache" if save_cache else "--load-cache"
    if not save_cache and not load_cache:
        return
    if save_cache and load_cache:
        raise UsageError("--save-cache and --load-cache do not go together: copy the file.")
    if compare:
        raise UsageError(f"{option} is for one cache, --compare for all: drop one of them.")
    if prompt_file:
        raise UsageError(f"{option} tells the document from the question: use --document instead of --prompt-file.")
    if load_cache and cache:
        raise UsageError("--load-cache gives the cache that was saved: drop --cache.")
    if cache == "stock":
        raise UsageError("--cache stock is transformers' own, which cannot be saved: use dynamic.")
    if save_cache:
        require_place(save_cache)


def _replaced(save_cache: Path | None, force: bool) -> str | None:
    """What `--save-cache` takes the place of, if anything is there."""
    if save_cache is not None:
        return what_is_replaced(save_cache, force, "--force")
    if force:
        raise UsageError("--force is for --save-cache: drop it.")
    return None


def _cpu_decode_of(text: str, name: str, compare: bool) -> bool | float | Literal["auto"]:
    """What `--cpu-decode` says, if the cache takes it."""
    if compare or name == "stock":
        which = "--compare is of caches as they are" if compare else "--cache stock is transformers' own"
        raise UsageError(f"{which}: drop --cpu-decode.")
    if text in ("yes", "no"):
        return text == "yes"
    if name != "offloaded":
        raise UsageError(f"--cpu-decode {text} is for --cache offloaded, and the cache is {name}: use yes or no.")
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--cpu-decode must be yes, no, auto or a share such as 0.6, got {text!r}.") from None


def _check_cache_options(
    given: Collection[str], name: str, cache: str | None, compare: bool, load_cache: Path | None
) -> None:
    """Refuse what would be ignored; `given` are fields of `CacheOptions`."""
    if compare:
        if cache:
            raise UsageError("--compare takes every cache: drop --cache.")
        return
    for field in given:
        option, kind = f"--{field.replace('_', '-')}", "quantized" if field == "bits" else "offloaded"
        if load_cache:
            raise UsageError(f"--load-cache gives the cache that was saved: drop {option}.")
        if name != kind and field != "cpu_decode":
            raise UsageError(f"{option} is for --cache {kind}, and the cache is {name}: drop one of them.")
