"""`hf-hybrid-cache chat`: a conversation about a document, the cache kept between questions."""

from functools import partial
from typing import cast

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache import HybridCache
from ..console import UsageError, note
from ..documents.document_budgets import document_budgets, truncation_notice
from ..documents.documents import Documents, read_documents
from ..documents.saved_document import saved_document
from ..interrupts import ignoring_interrupts
from ..loading.device import compile_kernels, load_model
from ..runs.prompts import context_length, default_document, document_prompt
from ..runs.timed_run import CacheOptions, new_cache
from ..terminal import write
from .answer_settings import AnswerSettings
from .chat_commands import take
from .chat_input import ChatInput, chat_input
from .chat_options import ChatOptions
from .conversation import Conversation
from .transcript import Transcript

# Tokens of a long context that the document leaves to the conversation.
TALK_TOKENS = 2048


def talk(options: ChatOptions, out: Console, notes: Console) -> None:
    """
    Read a document, or load one, and answer questions about it until the user ends the conversation.

    Args:
        options: of the command.
        out: receives answers.
        notes: receives remarks.

    Raises:
        UsageError: an option does not fit the machine or the model.
        PromptError: the model's context leaves no room for the document.
        ModelLoadError: the model cannot be loaded.
        CacheFileError: the saved cache cannot be loaded.
    """
    documents = read_documents(options.documents, partial(note, notes)) if options.documents else None
    saved = saved_document(options.load_cache) if options.load_cache else None
    lines = chat_input(options.keeps_history, partial(note, notes))
    ready = load_model(options.model, notes)
    if ready.tokenizer is None:
        raise UsageError(f"{options.model.name} has no tokenizer, so there is nothing to say.")
    compile_kernels(ready.model, options.cache_name == "quantized", notes)
    if saved is None:
        token_ids = _read_document(options, documents, ready.model, ready.tokenizer, out, notes)
        cache_options = CacheOptions(bits=options.cache_bits)
        cache = cast(HybridCache, new_cache(options.cache_name, ready.model.config, cache_options))
        document_tokens: int | None = len(token_ids)
    else:
        token_ids, document_tokens = saved.token_ids[0].tolist(), saved.document_tokens
        cache = _loaded_cache(options, len(token_ids), ready.model, notes)
    transcript = Transcript(
        ready.model, ready.tokenizer, cache, token_ids, options.answer.prefill_chunk_size, out, notes
    )
    settings = AnswerSettings(options.answer.max_new_tokens, options.answer.sampling.temperature)
    is_saved = saved is not None
    conversation = Conversation(
        transcript, ready.tokenizer, is_saved, document_tokens, settings, ready.weights_text, notes
    )
    conversation.read_document()
    if is_saved:
        conversation.show_last_turn()
    conversation.remark("ask something; /help lists what else can be typed")
    _take_all(conversation, lines)


def _loaded_cache(options: ChatOptions, num_tokens: int, model: PreTrainedModel, notes: Console) -> HybridCache:
    """The saved cache, of so many tokens."""
    assert options.load_cache is not None
    cache = HybridCache.load(options.load_cache, model.config, device=model.device)
    note(notes, f"read {options.load_cache}: {num_tokens:,} of {context_length(model):,} tokens are taken")
    return cache


def _read_document(
    options: ChatOptions,
    documents: Documents | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Console,
    notes: Console,
) -> list[int]:
    """The tokens of the documents, or of the default document, as many as leave room to talk."""
    context, max_new_tokens = context_length(model), options.answer.max_new_tokens
    reserved = max_new_tokens + min(TALK_TOKENS, context // 4)
    if context <= reserved:
        raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room in {context:,} tokens of context.")
    text = default_document() if documents is None else documents.text
    prompt = document_prompt(tokenizer, text, "?", options.context or context, context - reserved, apart=True)
    which = "document" if documents is None else documents.counted
    read = f"{which}: {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
    note(notes, f"{read}; {context - prompt.prefix_tokens:,} are left to talk")
    if documents is not None and prompt.kept_tokens < prompt.document_tokens:
        budgets = document_budgets(documents, tokenizer, prompt.kept_tokens)
        write(out, truncation_notice(prompt, context, options.context, budgets))
    token_ids: list[int] = prompt.input_ids[0, : prompt.prefix_tokens].tolist()
    return token_ids


def _take_all(conversation: Conversation, lines: ChatInput) -> None:
    """Take lines until one ends the conversation; Ctrl-C at a terminal does not."""
    if not lines.is_terminal:
        while (typed := lines.next_line()) is not None and take(conversation, typed):
            pass
        return
    with ignoring_interrupts():
        while True:
            try:
                typed = lines.next_line()
                if typed is None or not take(conversation, typed):
                    return
            except KeyboardInterrupt:
                conversation.remark("Ctrl-D or /quit ends the conversation, /save FILE keeps it")
