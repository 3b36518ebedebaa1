"""`hf-hybrid-cache chat`: a conversation about documents, which are read once, or about nothing."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .chat_commands import ChatCommands, ChatInput, chat_input, shortened
from .console import UsageError, consoles, exit_codes, note, raising_interrupts, think
from .options import (
    DOCUMENT,
    Cache,
    ConversationPrompt,
    FormedAnswerOptions,
    Model,
    Store,
    document_option,
    option,
    with_options,
)
from .task import say_what_is_read, say_what_is_stored_otherwise, why_no_more

if TYPE_CHECKING:
    from ..prefix_store import StoredPrompt

# Options of the model and the cache that are kept with a conversation, and hold when it is resumed.
_MODEL_OPTIONS = ("model", "weights", "experts", "dtype")
_CACHE_OPTIONS = ("cache", "bits")


@with_options
def chat(
    prompt: ConversationPrompt,
    model: Model,
    cache: Cache,
    answer: FormedAnswerOptions,
    store: Store,
    command_line: typer.Context,
    conversation: Annotated[
        str | None,
        typer.Argument(
            metavar="NUMBER|NAME|ID",
            help="The conversation to --resume, as the command store lists it. Default: the one used last.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[list[str] | None, document_option("none: the model is asked alone")] = None,
    resume: Annotated[
        bool,
        option(DOCUMENT, "Go on with a conversation of --store, with its model, weights and cache.", "--resume"),
    ] = False,
    name: Annotated[
        str | None, option(DOCUMENT, "Name of the conversation in --store, by which it goes on. Default: its id.")
    ] = None,
    no_history: Annotated[
        bool,
        typer.Option("--no-history", help="Do not keep typed lines, which the arrow keys bring back, in a file."),
    ] = False,
) -> None:
    """
    Talk with a model, about documents or without one.

    Documents are read once: they and the conversation stay in the cache, so an answer begins at once. Questions come
    from standard input, a line each, or several between triple quotes; answers go to stdout, remarks to stderr. /help
    lists what else can be typed, Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    out, notes = consoles()
    with exit_codes(notes):
        _check(conversation, document, resume, store, name)
        say = partial(note, notes)
        lines = chat_input(not no_history, say)
        stored = None
        if resume and store.folder is not None:
            stored = _chosen(store.folder, conversation)
            model, cache = _as_stored(stored, model, cache, command_line)
        cache.require_ours("chat")
        from ..documents import read_documents

        documents = read_documents(document, say) if document else None

        from ..chat import Chat
        from .loading import load_model

        prefix_store = store.open()
        loaded = load_model(model, cache.name, notes)
        options: dict[str, Any] = {**cache.arguments, "settings": answer.settings(), "remark": say}
        options |= {"thoughts": partial(think, notes), "most_tokens": prompt.context}
        if stored is not None:
            assert prefix_store is not None
            talk = Chat.resume(loaded.model, loaded.tokenizer, prefix_store, stored, **options)
            say(f"going on with {stored.name}: {len(talk.token_ids):,} of {talk.context:,} tokens are taken")
        else:
            details = {option: getattr(model, option) for option in _MODEL_OPTIONS} | ({"name": name} if name else {})
            options |= {"system": prompt.system, "store": prefix_store, "details": details}
            talk = Chat(loaded.model, loaded.tokenizer, documents or (), **options)
        if documents is not None:
            say_what_is_read(talk, why_no_more(talk), out, notes)
            say(f"{talk.num_free:,} tokens are left to talk")
            say_what_is_stored_otherwise(prefix_store, talk, notes)
            with raising_interrupts():
                seconds, reuse = talk.read(), talk.reuse
                is_taken = reuse is not None and reuse.num_tokens == len(talk.document.token_ids)
                say(f"document {'taken from the store' if is_taken else 'read'} in {seconds:.1f} s")
        if talk.turns:
            last = talk.turns[-1]
            say(f"last question: {shortened(last.question)}\nlast answer: {last.answer.strip()}")
        say("ask something; /help lists what else can be typed")
        # Ctrl-C ends only an answer where there is somebody who can end the conversation, too.
        with raising_interrupts() if lines.is_terminal else nullcontext():
            _take_all(ChatCommands(talk, out, notes, loaded.weights_text, lines.drop), lines, say)


def _check(
    conversation: str | None, documents: Sequence[str] | None, resume: bool, store: Store, name: str | None
) -> None:
    """Raise `UsageError` for options of a conversation that do not go together."""
    if "-" in (documents or ()):
        raise UsageError("Questions come from standard input: give the document as a file.")
    if conversation is not None and not resume:
        raise UsageError(f"{conversation!r} names a conversation to go on with: add --resume, or --document before it.")
    if resume and store.folder is None:
        raise UsageError("--resume goes on with a conversation of a prefix store: name its folder with --store.")
    if name is None:
        return
    if store.folder is None:
        raise UsageError("--name is of a conversation that a prefix store keeps: name its folder with --store.")
    if not name.strip() or name.isdigit():
        raise UsageError(f"--name {name!r} must have letters: numbers are those of the list.")
    from .store import existing_store, numbered

    if store.folder.expanduser().is_dir() and any(each.name == name for each in numbered(existing_store(store.folder))):
        raise UsageError(f"{store.folder} has a conversation {name}: go on with --resume {name}, or give another name.")


def _chosen(folder: Path, which: str | None) -> "StoredPrompt":
    """The conversation that a number, a name or an id names, or else the one used last; raises `UsageError`."""
    from .store import chosen, existing_store, numbered

    listed = numbered(existing_store(folder))
    if which is not None:
        stored = chosen(listed, which).stored
        if not stored.is_conversation:
            raise UsageError(f"{which!r} is a prompt, and no conversation: ask about its document with --document.")
        return stored
    for each in listed:
        if each.stored.is_conversation:
            return each.stored
    raise UsageError(f"{folder} has no conversation: begin one without --resume.")


def _as_stored(stored: "StoredPrompt", model: Model, cache: Cache, command_line: typer.Context) -> tuple[Model, Cache]:
    """The model and the cache of a conversation; raises `UsageError` if an option was given that has another value."""
    of_model: dict[str, Any] = {name: stored.details.get(name) for name in _MODEL_OPTIONS if "model" in stored.details}
    of_cache = {name: stored.details.get(name) for name in _CACHE_OPTIONS if "cache" in stored.details}
    values = asdict(model) | {"cache": cache.name, "bits": cache.quantized_bits}
    for name, wanted in (of_model | of_cache).items():
        source = command_line.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and values[name] != wanted:
            text = f"--{name.replace('_', '-')}"
            begun = f"without {text}" if wanted is None else f"with {text} {wanted}"
            raise UsageError(
                f"{text} {values[name]}: {stored.name} was begun {begun}, and goes on so: drop {text}, or begin "
                "another conversation without --resume."
            )
    return replace(model, **of_model), replace(cache, **of_cache)


def _take_all(commands: ChatCommands, lines: ChatInput, say: Callable[[str], None]) -> None:
    """Take lines until one ends the conversation; Ctrl-C at a terminal does not end it."""
    while True:
        try:
            typed = lines.next_line()
            if typed is None or not commands.take(typed):
                return
        except KeyboardInterrupt:
            if not lines.is_terminal:
                raise
            say("Ctrl-D or /quit ends the conversation")
