"""`hf-hybrid-cache chat`: a conversation about a document, the cache kept between questions."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console

from ..cache import HybridCache
from .answer_settings import AnswerSettings
from .chat_commands import take
from .chat_input import ChatInput, chat_input
from .console import UsageError, cache_of_ours, dtype_of, exit_codes, note, require_one_process
from .conversation import Conversation
from .device import compile_kernels, loaded
from .document_shares import shares_of, what_was_left_out
from .documents import read_documents
from .files import STANDARD_INPUT
from .interrupts import held_back
from .prompts import context_length, default_document, document_prompt
from .saved_document import document_ids
from .terminal import write
from .timed_run import CacheOptions, new_cache
from .transcript import Transcript
from .weight_options import WeightOptions

# Tokens of the context that are left to the conversation, of models with a long one.
TALK_TOKENS = 2048


def talk(
    *,
    document: Sequence[str],
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
    no_history: bool,
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
        documents = read_documents(document, partial(note, notes)) if document else None
        text = default_document() if documents is None else documents.text
        saved_ids = document_ids(load_cache) if load_cache else None
        lines = chat_input(not no_history, lambda said: note(notes, said))
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
            prompt = document_prompt(tokenizer, text, "?", context or longest, longest - reserved, apart=True)
            token_ids = prompt.input_ids[0, : prompt.prefix_tokens].tolist()
            filled = cast(HybridCache, new_cache(name, language_model.config, CacheOptions(bits=bits or 4)))
            which = "document" if documents is None else documents.counted
            said = f"{which}: {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
            note(notes, f"{said}; {longest - len(token_ids):,} are left to talk")
            if documents is not None and prompt.kept_tokens < prompt.document_tokens:
                shares = shares_of(documents, tokenizer, prompt.kept_tokens)
                write(out, what_was_left_out(prompt, longest, context, shares))
        transcript = Transcript(language_model, tokenizer, filled, token_ids, prefill_chunk_size, out, notes)
        settings = AnswerSettings(max_new_tokens, temperature)
        conversation = Conversation(transcript, tokenizer, saved_ids is not None, settings, ready.weights_said, notes)
        conversation.read_document()
        if saved_ids is not None:
            conversation.show_last_turn()
        conversation.remark("ask something; /help lists what else can be typed")
        _take_all(conversation, lines)


def _take_all(conversation: Conversation, lines: ChatInput) -> None:
    if not lines.is_terminal:
        while (typed := lines.next_line()) is not None and take(conversation, typed):
            pass
        return
    with held_back():
        while True:
            try:
                typed = lines.next_line()
                if typed is None or not take(conversation, typed):
                    return
            except KeyboardInterrupt:
                conversation.remark("Ctrl-D or /quit ends the conversation, /save FILE keeps it")


def _check(
    document: Collection[str], load_cache: Path | None, cache: str | None, bits: int | None, context: int | None
) -> None:
    """Refuse what would be ignored."""
    if STANDARD_INPUT in document:
        raise UsageError("Questions come from standard input: give the document as a file.")
    for option, value in (("--document", document), ("--cache", cache), ("--bits", bits), ("--context", context)):
        if load_cache and value not in (None, ()):
            raise UsageError(f"--load-cache gives the document and the cache that were saved: drop {option}.")
