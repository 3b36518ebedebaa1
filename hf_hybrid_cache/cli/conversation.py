"""`hf-hybrid-cache chat`: a conversation about a document, the cache kept between questions."""

import sys
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..layers import IncompleteCacheError
from ..saving import CacheFileError
from .console import UsageError, cache_of_ours, dtype_of, exit_codes, note, require_one_process
from .device import compile_kernels, loaded
from .prompts import (
    PromptError,
    context_length,
    default_document,
    document_prompt,
    question_tokens,
    what_was_left_out,
)
from .saved_document import document_ids
from .shown_run import shown_run
from .terminal import TokenStream, is_encodable, read_text, write
from .timed_run import CacheOptions, Run, new_cache
from .weight_options import WeightOptions

# Tokens of the context that are left to the conversation, of models with a long one.
TALK_TOKENS = 2048
HELP = """\
/save FILE   keep the conversation, computed, in a file for --load-cache
/stats       tokens, memory, and the speed of the last answer
/forget      go back to the document alone
/help        this list
/quit        end, as Ctrl-D does"""


def talk(
    *,
    document: Path | None,
    load_cache: Path | None,
    model: str,
    cache: str | None,
    bits: int | None,
    weights: int | None,
    experts: str | None,
    expert_bits: int | None,
    max_new_tokens: int,
    context: int | None,
    prefill_chunk_size: int,
    temperature: float,
    dtype: str | None,
    device: str | None,
) -> None:
    """Do what `chat` says with these options."""
    out, notes = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    with exit_codes(notes):
        require_one_process("chat")
        name = cache_of_ours(cache, bits)
        _check(document, load_cache, cache, bits, context)
        weight_options = WeightOptions(weights, experts, expert_bits)
        precision = dtype_of(dtype)
        text = read_text(document) if document else None
        saved_ids = document_ids(load_cache) if load_cache else None
        ready = loaded(model, precision, device, weight_options, notes)
        language_model, tokenizer = ready.model, ready.tokenizer
        if tokenizer is None:
            raise UsageError(f"{model} has no tokenizer, so there is nothing to say.")
        longest = context_length(language_model)
        compile_kernels(language_model, name == "quantized", notes)
        if load_cache and saved_ids is not None:
            filled = HybridCache.load(load_cache, language_model.config, device=language_model.device)
            token_ids = saved_ids[0].tolist()
            note(notes, f"read {load_cache}: {len(token_ids):,} of {longest:,} tokens are taken")
        else:
            reserved = max_new_tokens + min(TALK_TOKENS, longest // 4)
            if longest <= reserved:
                raise UsageError(
                    f"--max-new-tokens {max_new_tokens:,} leaves no room in {longest:,} tokens of context."
                )
            prompt = document_prompt(
                tokenizer, text or default_document(), "?", context or longest, longest - reserved, apart=True
            )
            token_ids = prompt.input_ids[0, : prompt.prefix_tokens].tolist()
            filled = cast(HybridCache, new_cache(name, language_model.config, CacheOptions(bits=bits or 4)))
            said = f"document: {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
            note(notes, f"{said}; {longest - len(token_ids):,} are left to talk")
            if text is not None and prompt.kept_tokens < prompt.document_tokens:
                write(out, what_was_left_out(prompt, longest, context))
        conversation = Conversation(
            language_model,
            tokenizer,
            filled,
            token_ids,
            max_new_tokens,
            prefill_chunk_size,
            temperature,
            ready.weights_said,
            out,
            notes,
        )
        conversation.read_document()
        note(notes, "ask something; /help lists what else can be typed")
        while (line := _next_line()) is not None:
            if not conversation.take(line.strip()):
                return


class Conversation:
    """
    Questions and answers, and the cache that holds them.

    Args:
        model: answers.
        tokenizer: of the model; its chat template tells turns apart, if it has one.
        cache: empty, or with the first of the tokens.
        token_ids: of the document, or of a conversation about it.
        max_new_tokens: of an answer at most.
        prefill_chunk_size: tokens of a prompt per forward pass.
        temperature: of sampling; 0 for the likeliest token.
        weights: what is said of them, if they are of few bits.
        out: where answers go.
        notes: where remarks go.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: HybridCache,
        token_ids: list[int],
        max_new_tokens: int,
        prefill_chunk_size: int,
        temperature: float,
        weights: str | None,
        out: Console,
        notes: Console,
    ):
        self._model, self._tokenizer, self._cache = model, tokenizer, cache
        self._token_ids = token_ids
        self._start = len(token_ids)
        self._max_new_tokens, self._chunk, self._temperature = max_new_tokens, prefill_chunk_size, temperature
        self._weights, self._out, self._notes = weights, out, notes
        self._longest = context_length(model)
        self._last: Run | None = None
        self._asked = 0

    def read_document(self) -> None:
        """Compute what is not in the cache yet."""
        if self._cache.get_seq_length() < len(self._token_ids) - 1:
            run = self._generate("document", 1, keep=False)
            note(self._notes, f"document read in {run.prefill_seconds:.1f} s")

    def take(self, line: str) -> bool:
        """Answer a line, or do what it says; whether the conversation goes on."""
        if not line:
            return True
        if not is_encodable(line):
            note(self._notes, "That is not UTF-8 text.")
            return True
        command, _, argument = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/save":
            self._save(argument.strip())
        elif command == "/stats":
            self._tell()
        elif command == "/forget":
            self._forget()
        elif command == "/help":
            note(self._notes, HELP)
        elif command.startswith("/"):
            note(self._notes, f"There is no {command}.\n{HELP}")
        else:
            self._ask(line)
        return True

    def _ask(self, question: str) -> None:
        try:
            new = question_tokens(self._tokenizer, self._token_ids, question)
        except PromptError as error:
            note(self._notes, str(error))
            return
        left = self._longest - len(self._token_ids) - len(new)
        if left < 1:
            note(
                self._notes,
                f"The conversation has {len(self._token_ids):,} tokens, the question {len(new):,}, and the model's "
                f"context is {self._longest:,}. /forget goes back to the document.",
            )
            return
        before = len(self._token_ids)
        self._token_ids += new
        try:
            self._last = self._generate("question", min(self._max_new_tokens, left), keep=True)
            self._asked += 1
        except KeyboardInterrupt:
            write(self._out, "\n")
            self._recover(before, before + len(new))
            note(self._notes, "the answer was ended")

    def _recover(self, before: int, asked: int) -> None:
        """After an interrupt: go on with what was said, or where nothing was, as if nothing had been asked."""
        try:
            self._cache.drop_unfinished()
        except IncompleteCacheError:
            self._cache.reset()
        if len(self._token_ids) == asked:
            del self._token_ids[before:]
            self._shorten(before)

    def _generate(self, what: str, max_new_tokens: int, keep: bool) -> Run:
        stream = TokenStream(self._out, self._tokenizer)

        def on_token(token: int) -> None:
            self._token_ids.append(token)
            stream.put(token)

        run = shown_run(
            self._notes,
            what,
            self._model,
            torch.tensor([self._token_ids]),
            self._cache,
            max_new_tokens,
            self._chunk,
            on_token if keep else None,
            self._temperature,
        )
        if keep:
            stream.end()
        return run

    def _save(self, name: str) -> None:
        if not name:
            note(self._notes, "Name a file: /save FILE")
            return
        held = self._cache.get_seq_length()
        if held < len(self._token_ids):  # the last token of an answer is stored with the next one
            new = torch.tensor([self._token_ids[held:]], device=self._model.device)
            with torch.inference_mode():
                self._model(new, **cache_argument(self._cache))
        try:
            self._cache.save(Path(name).expanduser(), torch.tensor([self._token_ids]))
        except (CacheFileError, OSError, ValueError) as error:
            note(self._notes, str(error))
            return
        size = Path(name).expanduser().stat().st_size / 2**20
        note(self._notes, f"{len(self._token_ids):,} tokens, {size:,.1f} MiB, are in {name}")

    def _tell(self) -> None:
        note(self._notes, repr(self._cache))
        if self._weights is not None:
            note(self._notes, self._weights)
        note(self._notes, f"{len(self._token_ids):,} of {self._longest:,} tokens are taken")
        if self._last is not None:
            rate = self._last.decode_tokens_per_second
            speed = "" if rate is None else f", {rate:.1f} tokens/s after it"
            note(self._notes, f"last answer: first token after {self._last.prefill_seconds:.2f} s{speed}")

    def _forget(self) -> None:
        del self._token_ids[self._start :]
        self._shorten(self._start)
        note(self._notes, f"back to {self._start:,} tokens")

    def _shorten(self, num_tokens: int) -> None:
        """Let the cache hold so many tokens at most; some cannot go back, and compute them again."""
        surplus = self._cache.get_seq_length() - num_tokens
        if surplus > 0 and self._cache.is_croppable:
            self._cache.crop(-surplus)
        elif surplus > 0:
            self._cache.reset()


def _check(
    document: Path | None, load_cache: Path | None, cache: str | None, bits: int | None, context: int | None
) -> None:
    """Refuse what would be ignored."""
    if document is not None and str(document) == "-":
        raise UsageError("Questions come from standard input: give the document as a file.")
    for option, value in (("--document", document), ("--cache", cache), ("--bits", bits), ("--context", context)):
        if load_cache and value is not None:
            raise UsageError(f"--load-cache gives the document and the cache that were saved: drop {option}.")


def _next_line() -> str | None:
    """What is typed next; `None` at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
