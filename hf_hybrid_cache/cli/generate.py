"""`hf-hybrid-cache generate`: one answer of a model, alone or about documents."""

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..documents import piped_documents, read_documents, require_nothing_piped
from .console import UsageError, consoles, end_line, exit_codes, note, print_json, write
from .options import (
    CACHE,
    COMPARED_TOKENS,
    DEFAULT_BITS,
    DOCUMENT,
    NEW_TOKENS,
    AsJson,
    Cache,
    FormedAnswerOptions,
    Model,
    Prompt,
    Quiet,
    Store,
    document_option,
    given_text,
    option,
    with_options,
)
from .task import (
    Task,
    dtype_text,
    on_thought,
    record,
    say_what_is_read,
    say_what_is_stored_otherwise,
    summary,
    why_no_more,
)

if TYPE_CHECKING:
    from ..chat import Chat
    from ..prefix_store import PrefixStore
    from .loading import LoadedModel


@with_options
def generate(
    prompt: Prompt,
    store: Store,
    cache: Cache,
    model: Model,
    answer: FormedAnswerOptions,
    asked: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION",
            help="Question to the model. Without one --store only reads and keeps the documents.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        document_option("what is piped in, or none: the model is asked alone", ", or - for standard input"),
    ] = None,
    question: Annotated[str | None, option(DOCUMENT, "The question, in another place.", "--question", "-q")] = None,
    explain: Annotated[
        bool, option(DOCUMENT, "Tell what is taken from --store, and why no more.", "--explain")
    ] = False,
    compare: Annotated[
        bool,
        option(
            CACHE,
            "Answer with every cache; by default a question about Python's language reference. An answer has "
            f"{COMPARED_TOKENS} tokens if --max-new-tokens says no other number.",
            "--compare",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Answer a question, alone or about documents.

    The answer and the table go to stdout, progress and remarks to stderr.
    """
    out, notes = consoles(quiet)
    with exit_codes(notes):
        if store.folder is not None:
            cache.require_ours("--store")
        elif explain:
            raise UsageError("--explain is about a prefix store: name its folder with --store, or drop it.")
        question = _one_question(asked, question, document)
        for name, text in (("--question", question), ("--system", prompt.system)):
            if text is not None and not text.strip():
                raise UsageError(f"{name} is empty.")
        documents, asks = None, question is not None
        if answer.choices and not asks:
            raise UsageError("--choices takes all words that follow it: ask before it, or by --question.")
        if compare or (document and "-" not in document):
            require_nothing_piped()
        if document:
            if not asks:
                _require_keeping(True, store.folder is not None, as_json)
            documents = read_documents(document, partial(note, notes))
        elif not compare:
            documents = piped_documents(partial(note, notes))
        if prompt.context is not None and documents is None and not compare:
            note(notes, f"--context {prompt.context:,} is of documents, and there is none")
        if not asks and (documents is not None or not compare):
            _require_keeping(documents is not None, store.folder is not None, as_json)
        task = Task(documents, question, prompt, answer.settings(COMPARED_TOKENS if compare else NEW_TOKENS))
        form = {"model": model.name, "cache": cache.name, "bits": cache.quantized_bits, "weights": model.weights}
        # What follows imports torch.
        prefix_store = store.open()
        from .loading import load_model

        loaded = load_model(model, "quantized" if compare else cache.name, notes)
        note(notes, f"model: {dtype_text(loaded.model)} on {loaded.model.device}")
        if compare:
            from .compare import compare_caches

            compare_caches(task, loaded, form | {"bits": cache.bits or DEFAULT_BITS}, as_json, out, notes)
            return
        chat = task.chat(loaded, notes, **cache.arguments, store=prefix_store, details=form)
        explaining = consoles()[1]  # what is asked for is said, also where remarks are quiet
        text_out = Console(quiet=True) if as_json else out
        say_what_is_read(chat, why_no_more(chat), text_out, notes)
        say_what_is_stored_otherwise(prefix_store, chat, notes)
        pieces = task.ask(chat)
        if prefix_store is not None and explain:
            _say_why_no_more(prefix_store, loaded, chat, explaining)
        if prefix_store is not None and not asks:
            seconds = chat.read()
            num_read = len(chat.token_ids) - (chat.reuse.num_tokens if chat.reuse else 0)
            note(notes, f"{num_read:,} tokens are read and kept in {prefix_store.path} in {seconds:.2f} s")
            return
        for text in pieces:
            write(text_out, text)
        end_line(text_out)
        if explain and chat.reuse is not None:
            note(explaining, chat.reuse.text(lambda token: repr(loaded.tokenizer.decode([token]))))
        took = record(chat, form)
        if chat.last and (said := on_thought(chat.last, chat.settings, "--no-thinking", "--max-thinking-tokens")):
            note(notes, said)
        if as_json:
            print_json(out, took)
        elif took["finish_reason"] == "length":
            note(notes, f"ended at --max-new-tokens {task.settings.max_new_tokens:,}, which may be raised")
        elif took["finish_reason"] == "context":
            note(notes, f"ended at the model's context of {chat.context:,} tokens: --context reads less of a document")
        note(notes, summary(took, loaded.weights_text))


def _one_question(asked: str | None, question: str | None, documents: Sequence[str] | None) -> str | None:
    """The question, which may be an argument or an option; raises `UsageError` where it is both, or a lost file."""
    if asked is None:
        return None if question is None else given_text("--question", question)
    if question is not None:
        raise UsageError(f"{asked!r} is no document that is here, and --question asks already: drop one of them.")
    if documents and re.fullmatch(r"\S+\.\w+", asked):
        raise UsageError(f"There is no file {asked}. If that is the question: --question {asked}")
    if re.fullmatch(r"https?:/\S*", asked):
        raise UsageError(f"{asked} is an address: ask about it by --document, or add words to the question.")
    return given_text("The question", asked)


def _require_keeping(has_document: bool, keeps: bool, as_json: bool) -> None:
    """Raise `UsageError` unless documents are to be kept, where nothing is asked."""
    if not has_document or not keeps:
        raise UsageError('Ask something, such as "Who signed it?"; --store keeps a document without.')
    if as_json:
        raise UsageError("--json is of an answer: ask something with --question, or drop it.")


def _say_why_no_more(store: "PrefixStore", loaded: "LoadedModel", chat: "Chat", notes: Console) -> None:
    """Tell what of a store cannot be used, and why."""
    from ..cache import HybridCache

    if len(chat.token_ids) > 1 and isinstance(chat.cache, HybridCache):
        for line in store.why(loaded.model, chat.token_ids, chat.cache, len(chat.token_ids)).splitlines()[1:]:
            note(notes, line)
