"""`hf-hybrid-cache generate`: ask a question about a long document, with any of the caches."""

import sys
import time
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.utils import disable_progress_bars
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from ..cache import HybridCache
from ..models import NAMED_MODELS, load
from ..saving import require_place, saved_token_ids
from .console import DTYPES, UsageError, check_choice, exit_codes, note
from .demo import (
    CACHES,
    DEFAULT_QUESTION,
    CacheOptions,
    Prompt,
    Run,
    context_length,
    default_document,
    document_prompt,
    following_prompt,
    random_prompt,
    timed_generate,
    verbatim_prompt,
    warm_up,
)

RANDOM_TOKENS = 2000


def generate(
    document: Annotated[
        Path | None,
        typer.Option(
            help="Text to ask about, - for standard input; what does not fit is cut off and said. Default: Python's "
            "language reference."
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help=f"About the document; without one, --save-cache only saves. Default, without --document: "
            f"{DEFAULT_QUESTION}"
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The whole prompt, used as it is, instead of document and question.")
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(NAMED_MODELS)}, a model of the Hugging Face Hub, or a folder.")
    ] = next(iter(NAMED_MODELS)),
    cache: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(CACHES)}. Default: offloaded, or as it was saved.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Generate with every cache and print a table.")] = False,
    save_cache: Annotated[
        Path | None, typer.Option(help="Keep the document, computed, in this file, for other questions.")
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(help="Ask about the document that was kept in this file; --document is not needed.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")] = 64,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--context-tokens",
            min=1,
            help="Tokens of the document to keep at most. Default: what fits the model; "
            f"{RANDOM_TOKENS:,} random ones for a model without a tokenizer.",
        ),
    ] = None,
    prefill_chunk_size: Annotated[int, typer.Option(min=1, help="Tokens of the prompt per forward pass.")] = 512,
    prefetch_layers: Annotated[
        int | None, typer.Option(min=0, help="offloaded: layers on their way to the device ahead of use. Default: 1.")
    ] = None,
    resident_layers: Annotated[
        int | None, typer.Option(min=0, help="offloaded: layers that stay on the device. Default: 0.")
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="Bits of each number, 8, 4 or 2; means --cache quantized, whose default is 4."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}. Default: the model's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... Default: an accelerator if any.")] = None,
) -> None:
    """
    Answer a question about a document.

    The answer and the table go to stdout, progress and remarks to stderr. Decoding is greedy.
    """
    out, notes = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    with exit_codes(notes):
        _check_files(save_cache, load_cache, cache, compare, prompt_file)
        if cache is not None:
            check_choice("--cache", cache, CACHES)
        if bits not in (None, 8, 4, 2):
            raise UsageError(f"--bits must be 8, 4 or 2, got {bits}.")
        name = cache or ("offloaded" if bits is None else "quantized")
        of_caches = {"bits": bits, "prefetch_layers": prefetch_layers, "resident_layers": resident_layers}
        given = {field: value for field, value in of_caches.items() if value is not None}
        _check_cache_options(given, name, cache, compare, load_cache)
        if dtype is not None:
            check_choice("--dtype", dtype, DTYPES)
        if prompt_file and (document or question is not None):
            raise UsageError("--prompt-file is the whole prompt: drop it, or --document and --question.")
        if prompt_file and context is not None:
            raise UsageError("--prompt-file is used as it is: drop --context, or pass the text as --document.")
        if question is None and load_cache:
            raise UsageError("Ask something about the saved document: --question.")
        if question is None and document and not save_cache:
            raise UsageError("Ask something about the document: --question. --save-cache keeps it for later questions.")
        if question is not None and not question.strip():
            raise UsageError("--question is empty.")
        if question is not None and not _is_encodable(question):
            raise UsageError(f"--question {question!r} is not UTF-8 text.")
        source = prompt_file or document
        text = _read_text(source) if source else None
        saved_ids = _document_ids(load_cache) if load_cache and text is None else None
        if not notes.is_interactive:
            disable_progress_bars()
            transformers_logging.disable_progress_bar()

        chosen_device = _checked_device(device)
        note(notes, f"loading {model}")
        language_model, tokenizer = load(model, DTYPES[dtype] if dtype else None, chosen_device)
        longest = context_length(language_model)
        precision = str(language_model.dtype).removeprefix("torch.")
        note(notes, f"model: {precision} on {language_model.device}, context of {longest:,} tokens")
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
                tokenizer, text or default_document(), question or DEFAULT_QUESTION, context or room, room, is_apart
            )
            kept = f"kept {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
            note(notes, f"document: {kept}; prompt: {prompt.input_ids.shape[1]:,} tokens")
            if text is not None and prompt.kept_tokens < prompt.document_tokens:
                _write(out, _what_was_left_out(prompt, longest, context))

        task = _Task(language_model, prompt, CacheOptions(**given), max_new_tokens, prefill_chunk_size, notes)
        stream = _Stream(out, tokenizer)
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
            note(notes, _summary(name, run))
            return
        runs = {}
        for name in CACHES:
            task.warm_up(name)
            runs[name] = task.run(name)
            if name == "stock":
                for token in runs[name].tokens:  # only now: writing while it runs would be timed
                    stream.put(token)
                stream.end()
        out.print(_table(runs))


@dataclass(frozen=True)
class _Task:
    """One prompt for one model, to be run with any cache, each time a new one unless one is given."""

    model: PreTrainedModel
    prompt: Prompt
    options: CacheOptions
    max_new_tokens: int
    prefill_chunk_size: int
    notes: Console

    def warm_up(self, name: str) -> None:
        warm_up(self.model, self.prompt.input_ids, self._new_cache(name))

    @property
    def _prefix(self) -> torch.Tensor:
        return self.prompt.input_ids[:, : self.prompt.prefix_tokens]

    def save(self, name: str, path: Path) -> HybridCache:
        """A cache that holds what is before the question, which `path` then does too."""
        cache = self._new_cache(name)
        assert isinstance(cache, HybridCache)
        run = self._generate(f"{name}: document", self._prefix, cache, 1)
        start = time.perf_counter()
        cache.save(path, self._prefix)
        seconds = time.perf_counter() - start
        size = _mebibytes(path.stat().st_size)
        note(self.notes, f"document: prefill {run.prefill_seconds:.2f} s; {size} written to {path} in {seconds:.2f} s")
        return cache

    def load(self, path: Path) -> HybridCache:
        """The cache that `save` wrote, if it is of what is before the question."""
        start = time.perf_counter()
        cache = HybridCache.load(path, self.model.config, device=self.model.device, token_ids=self._prefix)
        seconds = time.perf_counter() - start
        left = self.prompt.input_ids.shape[1] - cache.get_seq_length()
        note(self.notes, f"document: read from {path} in {seconds:.2f} s; {left:,} tokens of the prompt are left")
        return cache

    def run(self, name: str, on_token: Callable[[int], None] | None = None, cache: HybridCache | None = None) -> Run:
        """Generate once; on a terminal a bar shows the prefill."""
        filled = cache.get_seq_length() if cache else 0
        return self._generate(
            f"{name}: prefill",
            self.prompt.input_ids,
            cache or self._new_cache(name),
            self.max_new_tokens,
            filled,
            on_token,
        )

    def _generate(
        self,
        title: str,
        input_ids: torch.Tensor,
        cache: Cache,
        max_new_tokens: int,
        filled: int = 0,
        on_token: Callable[[int], None] | None = None,
    ) -> Run:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.notes, transient=True, disable=not self.notes.is_interactive) as progress:
            bar = progress.add_task(title, total=input_ids.shape[1] - filled)

            def on_each_token(token: int) -> None:
                progress.stop()  # before the answer is written where the bar was
                if on_token:
                    on_token(token)

            return timed_generate(
                self.model,
                input_ids,
                cache,
                max_new_tokens,
                self.prefill_chunk_size,
                on_prefill=lambda num_tokens: progress.advance(bar, num_tokens),
                on_token=on_each_token,
            )

    def _new_cache(self, name: str) -> Cache:
        try:
            return CACHES[name](self.model.config, self.options)
        except ValueError as error:  # a cache checks its options against the model
            raise UsageError(str(error)) from error


class _Stream:
    """Writes tokens as they come: words with a tokenizer, token numbers without."""

    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase | None):
        self._out = out
        self._words = _Words(out, tokenizer) if tokenizer else None

    def put(self, token: int) -> None:
        if self._words:
            self._words.put(torch.tensor([token]))
        else:
            _write(self._out, f"{token} ")

    def end(self) -> None:
        if self._words:
            self._words.end()
        _write(self._out, "\n")


class _Words(TextStreamer):
    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        _write(self._out, text)


def _write(out: Console, text: str) -> None:
    # A model can produce any character, and an escape sequence would act on the terminal.
    text = "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
    out.print(text, end="", markup=False, highlight=False, emoji=False)
    out.file.flush()


def _summary(name: str, run: Run) -> str:
    return (
        f"{name}: prefill {run.prefill_seconds:.2f} s, decode {_rate(run)} tokens/s, "
        f"KV {_mebibytes(run.device_bytes)} on the device, {_mebibytes(run.host_bytes)} on the host"
    )


def _table(runs: dict[str, Run]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("cache")
    for heading in ("prefill\nseconds", "decode\ntokens/s", "KV on\ndevice", "KV on\nhost"):
        table.add_column(heading, justify="right")
    table.add_column("same tokens\nas stock")
    for name, run in runs.items():
        different = run.first_difference(runs["stock"])
        table.add_row(
            name,
            f"{run.prefill_seconds:.2f}",
            _rate(run),
            _mebibytes(run.device_bytes),
            _mebibytes(run.host_bytes),
            "yes" if different is None else f"no, from {different}",
        )
    return table


def _rate(run: Run) -> str:
    return "-" if run.decode_tokens_per_second is None else f"{run.decode_tokens_per_second:.1f}"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


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
        if name != kind:
            raise UsageError(f"{option} is for --cache {kind}, and the cache is {name}: drop one of them.")


def _what_was_left_out(prompt: Prompt, longest: int, asked_for: int | None) -> str:
    left = prompt.document_tokens - prompt.kept_tokens
    reason = f"the model's context is {longest:,}" if asked_for is None else f"--context {asked_for:,}"
    return (
        f"[Only the first {prompt.kept_tokens:,} of the document's {prompt.document_tokens:,} tokens were read "
        f"({reason}). The answer knows nothing of the last {left:,}.]\n\n"
    )


def _document_ids(path: Path) -> torch.Tensor:
    token_ids = saved_token_ids(path)
    if token_ids is None or token_ids.shape[0] != 1:
        raise UsageError(f"{path} was not saved with --save-cache: it lacks the tokens of a document.")
    return token_ids


def _is_encodable(text: str) -> bool:
    """Whether it is text throughout: what a terminal passes on in another encoding is not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_text(path: Path) -> str:
    try:
        text = sys.stdin.buffer.read().decode() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start:,} is {error.object[error.start]:#04x})."
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not the name of a file: {error}.") from error
    if "\0" in text:
        raise UsageError(f"{path} is a binary file, not text.")
    if not text.strip():
        raise UsageError(f"{path} is empty.")
    return text


def _checked_device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = ["cpu"] + (
        [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())] if accelerator else []
    )
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        device = torch.device("meta")
    wanted = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    if wanted not in here:
        raise UsageError(f"--device {name!r} is not here: this machine has {', '.join(here)}.")
    return device
