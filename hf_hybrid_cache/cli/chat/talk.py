"""`hf-hybrid-cache chat`: a conversation about a document, the cache kept between questions."""

from dataclasses import dataclass
from functools import partial
from typing import cast

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache import HybridCache
from ...prefix_store import KeptPrompt, PrefixStore
from ..console import UsageError, note
from ..documents.document_budgets import document_budgets, truncation_notice
from ..documents.documents import Documents, read_documents
from ..documents.saved_document import saved_document
from ..interrupts import ignoring_interrupts
from ..kept.kept_list import existing_store
from ..loading import LoadedModel, compile_kernels, load_model
from ..runs.prompt_store import PromptStore
from ..runs.prompts import DEFAULT_DOCUMENT, context_length, default_document, document_prompt
from ..runs.timed_run import CacheOptions, new_cache
from ..terminal import write
from .answer_settings import AnswerSettings
from .chat_commands import take
from .chat_input import ChatInput, chat_input
from .chat_options import ChatOptions
from .conversation import Conversation
from .kept_conversation import KeptConversation
from .resumed import resumed
from .transcript import Transcript

# Tokens of a long context that the document leaves to the conversation.
TALK_TOKENS = 2048


@dataclass(frozen=True)
class _Start:
    """
    The beginning of a conversation.

    Attributes:
        token_ids: of the document, or of a conversation about it.
        document_tokens: how many of them are the document's; `None` where that is not known.
        cache: empty, or with the first of the tokens.
        kept: keeps the conversation; `None` without `--keep`.
        is_saved: whether the tokens come from a file or a folder.
    """

    token_ids: list[int]
    document_tokens: int | None
    cache: HybridCache
    kept: KeptConversation | None = None
    is_saved: bool = False


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
        PrefixStoreError: the document cannot be kept, or the conversation is of another model or form of cache.
        PrefixFolderError: the folder of `--keep` cannot be used.
    """
    documents = read_documents(options.documents, partial(note, notes)) if options.documents else None
    saved = saved_document(options.load_cache) if options.load_cache else None
    prompts = _prompts(options)
    lines = chat_input(options.keeps_history, partial(note, notes))
    going_on = None
    if prompts is not None and options.resumes:
        choice = chat_input(keeps_history=False, say=partial(note, notes))
        going_on = resumed(prompts, options.which, choice, notes)
        if going_on is None:
            return
    ready = load_model(options.model, notes)
    if ready.tokenizer is None:
        raise UsageError(f"{options.model.name} has no tokenizer, so there is nothing to say.")
    compile_kernels(ready.model, options.cache_name == "quantized", notes)
    if saved is not None:
        token_ids = saved.token_ids[0].tolist()
        cache = _loaded_cache(options, len(token_ids), ready.model, notes)
        start = _Start(token_ids, saved.document_tokens, cache, is_saved=True)
    else:
        start = _kept_start(options, documents, prompts, going_on, ready, out, notes)
    transcript = Transcript(
        ready.model,
        ready.tokenizer,
        start.cache,
        start.token_ids,
        options.answer.prefill_chunk_size,
        out,
        notes,
        start.kept,
    )
    settings = AnswerSettings(options.answer.max_new_tokens, options.answer.sampling.temperature)
    conversation = Conversation(
        transcript, ready.tokenizer, start.is_saved, start.document_tokens, settings, ready.weights_text, notes
    )
    conversation.read_document()
    if start.is_saved:
        conversation.show_last_turn()
    conversation.remark("ask something; /help lists what else can be typed")
    _take_all(conversation, lines)


def _prompts(options: ChatOptions) -> PrefixStore | None:
    """The store in the folder of `--keep`, which is not made where a conversation goes on."""
    if options.keep is None:
        return None
    return existing_store(options.keep) if options.resumes else PrefixStore(options.keep)


def _kept_start(
    options: ChatOptions,
    documents: Documents | None,
    prompts: PrefixStore | None,
    going_on: KeptPrompt | None,
    ready: LoadedModel,
    out: Console,
    notes: Console,
) -> _Start:
    """The start of a conversation that is kept, if there is a store."""
    assert ready.tokenizer is not None

    def empty_cache() -> HybridCache:
        cache_options = CacheOptions(bits=options.cache_bits)
        return cast(HybridCache, new_cache(options.cache_name, ready.model.config, cache_options))

    cache = empty_cache()
    if going_on is None:
        token_ids = _read_document(options, documents, ready.model, ready.tokenizer, out, notes)
        document_tokens = len(token_ids)
    else:
        token_ids, document_tokens = going_on.token_ids.tolist(), going_on.document_tokens
        assert prompts is not None
        prompts.resume(ready.model, going_on, cache)
        taken = f"{len(token_ids):,} of {context_length(ready.model):,} tokens are taken"
        note(notes, f"going on with {going_on.name}: {taken}")
    if prompts is None:
        return _Start(token_ids, document_tokens, cache)
    kept = KeptConversation(
        PromptStore(prompts, ready.tokenizer, notes),
        ready.model,
        empty_cache,
        DEFAULT_DOCUMENT if documents is None else documents.title,
        None if going_on is None else going_on.title,
        None if going_on is None else going_on.id,
        token_ids,
        document_tokens,
        notes,
    )
    return _Start(token_ids, document_tokens, cache, kept, is_saved=going_on is not None)


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
    """Take lines until one ends the conversation, and keep it after each; Ctrl-C at a terminal does not end it."""
    if not lines.is_terminal:
        while (typed := lines.next_line()) is not None and take(conversation, typed):
            conversation.keep()
        return
    with ignoring_interrupts():
        while True:
            try:
                typed = lines.next_line()
                if typed is None or not take(conversation, typed):
                    return
                conversation.keep()
            except KeyboardInterrupt:
                conversation.remark("Ctrl-D or /quit ends the conversation, /save FILE keeps it")
