"""The prompt of `generate`, made from the text that its options name."""

from dataclasses import dataclass
from functools import partial

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..choices import DEFAULT_QUESTION, RANDOM_TOKENS
from ..console import UsageError, note
from ..documents.document_budgets import document_budgets, truncation_notice
from ..documents.documents import Documents, read_documents
from ..documents.saved_document import SavedDocument, saved_document
from ..files import read_text
from ..loading import LoadedModel
from ..runs.prompts import (
    Prompt,
    context_length,
    default_document,
    document_prompt,
    following_prompt,
    random_prompt,
    verbatim_prompt,
)
from ..terminal import write
from .generate_options import GenerateOptions


@dataclass(frozen=True)
class PromptSource:
    """
    The files that a prompt is made from, read before the model is loaded.

    Attributes:
        documents: the documents that were named; `None` for the default document.
        verbatim: the text of `--prompt-file`.
        saved: the tokens of a saved document that no `--document` names again.
    """

    documents: Documents | None = None
    verbatim: str | None = None
    saved: SavedDocument | None = None

    @property
    def is_default(self) -> bool:
        """Whether the options name no text."""
        return self.documents is None and self.verbatim is None and self.saved is None


def read_source(options: GenerateOptions, notes: Console) -> PromptSource:
    """
    Read the files that the options name.

    Raises:
        UsageError: a file cannot be read, or is not text.
        CacheFileError: the saved cache cannot be read.
    """
    if options.prompt.prompt_file:
        return PromptSource(verbatim=read_text(options.prompt.prompt_file))
    if options.prompt.documents:
        return PromptSource(read_documents(options.prompt.documents, partial(note, notes)))
    if options.files.load:
        return PromptSource(saved=saved_document(options.files.load))
    return PromptSource()


def make_prompt(
    options: GenerateOptions, source: PromptSource, ready: LoadedModel, out: Console, notes: Console
) -> Prompt:
    """
    The prompt that the options ask for; a remark says how many tokens it has.

    Args:
        options: of the command.
        source: the text.
        ready: the model.
        out: receives what is said before the answer, if documents were cut.
        notes: receives remarks.

    Raises:
        UsageError: the model takes no text, or its context leaves no room for an answer.
        PromptError: the prompt does not fit.
    """
    context, max_new_tokens = context_length(ready.model), options.answer.max_new_tokens
    room = context - max_new_tokens
    if room < 1:
        raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room in a context of {context:,} tokens.")
    question = options.prompt.question or DEFAULT_QUESTION
    if ready.tokenizer is None:
        prompt = _random_prompt(options, source, ready, room)
        note(notes, f"prompt: {prompt.num_tokens:,} random tokens")
    elif source.verbatim is not None:
        prompt = verbatim_prompt(ready.tokenizer, source.verbatim, room)
        note(notes, f"prompt: {prompt.num_tokens:,} tokens")
    elif source.saved is not None:
        saved = source.saved
        prompt = following_prompt(ready.tokenizer, saved.token_ids, saved.document_tokens, question, room)
        note(notes, f"prompt: {prompt.num_tokens:,} tokens, {prompt.prefix_tokens:,} of them in {options.files.load}")
    else:
        prompt = _document_prompt(options, source.documents, ready.tokenizer, room, notes)
        if source.documents is not None and prompt.kept_tokens < prompt.document_tokens:
            budgets = document_budgets(source.documents, ready.tokenizer, prompt.kept_tokens)
            write(out, truncation_notice(prompt, context, options.prompt.context, budgets))
    return prompt


def _random_prompt(options: GenerateOptions, source: PromptSource, ready: LoadedModel, room: int) -> Prompt:
    """Random tokens for a model without a tokenizer; an error if the options ask for text."""
    if not source.is_default or options.prompt.question is not None or options.files.option is not None:
        raise UsageError(
            f"{options.model.name} has no tokenizer: it takes no text, only the random tokens it gets without."
        )
    return random_prompt(ready.model, min(options.prompt.context or RANDOM_TOKENS, room))


def _document_prompt(
    options: GenerateOptions,
    documents: Documents | None,
    tokenizer: PreTrainedTokenizerBase,
    room: int,
    notes: Console,
) -> Prompt:
    """The start of the documents, or of the default document, and a question after it."""
    prompt = document_prompt(
        tokenizer,
        default_document() if documents is None else documents.text,
        options.prompt.question or DEFAULT_QUESTION,
        options.prompt.context or room,
        room,
        options.files.option is not None,
        options.prompt.system,
    )
    kept = f"kept {prompt.kept_tokens:,} of {prompt.document_tokens:,} tokens"
    which = "document" if documents is None else documents.counted
    note(notes, f"{which}: {kept}; prompt: {prompt.num_tokens:,} tokens")
    return prompt
