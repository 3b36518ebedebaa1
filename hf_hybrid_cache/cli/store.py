"""`hf-hybrid-cache store`: what a prefix store keeps, numbered from the one that was used last."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console

from .console import UsageError, consoles, exit_codes, note, print_json, without_controls, write
from .options import with_options

if TYPE_CHECKING:
    from ..prefix_store import StoredPrompt, StoredPrompts

_SHORT_ID, _SHORTEST_ID = 8, 4
_HEADINGS = ("", "id", "name", "kind", "model", "weights", "cache", "tokens", "MiB", "last use", "title")
_NUMBERS = ("", "tokens", "MiB")
# Columns that go first where a terminal has no room for all and the beginning of a title.
_LESS_WANTED, _LEAST_TITLE = ("MiB", "weights", "kind", "last use", "model", "tokens", "cache"), 24


@dataclass(frozen=True)
class Numbered:
    """A prompt, or a conversation, and its number in the list, from 1 on."""

    number: int
    stored: "StoredPrompt"

    @property
    def kind(self) -> str:
        return "conversation" if self.stored.is_conversation else "prompt"

    @property
    def id(self) -> str:
        """The id of a conversation, which stays as it goes on, or of a prompt."""
        return str(self.stored.details.get("id", self.stored.id))

    @property
    def name(self) -> str | None:
        """The name that a conversation was given."""
        return self.stored.details.get("name") if self.stored.is_conversation else None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that `store --json` prints; `None` for what is not known."""
        stored, details = self.stored, self.stored.details
        return {
            "number": self.number,
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "model": details.get("model") or stored.model_name,
            "weights": details.get("weights"),
            "cache": details.get("cache"),
            "bits": details.get("bits"),
            "tokens": len(stored.token_ids),
            "document_tokens": stored.document_tokens,
            "bytes": stored.num_bytes,
            "last_use": round(stored.last_use, 3),
            "title": stored.title,
        }

    @property
    def row(self) -> tuple[str, ...]:
        """The texts of `_HEADINGS`; the title comes last, as it may be long."""
        fields = self.fields
        bits = {name: f"{fields[name]} bits" if fields[name] else "" for name in ("weights", "bits")}
        texts = (
            str(self.number),
            self.id[:_SHORT_ID],
            self.name or "",
            self.kind,
            Path(fields["model"]).name,
            bits["weights"],
            bits["bits"] or fields["cache"] or "",
            f"{fields['tokens']:,}",
            f"{self.stored.num_bytes / 2**20:,.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(self.stored.last_use)),
            " ".join(self.stored.title.split()),
        )
        return tuple(map(without_controls, texts))


def existing_store(folder: Path) -> "StoredPrompts":
    """
    The list of a store, whose folder is not made.

    Raises:
        UsageError: there is no such folder.
        PrefixStoreFolderError: the folder has other files, or cannot be used.
    """
    if not folder.expanduser().is_dir():
        raise UsageError(f"There is no folder {folder}: name the one that generate, batch or chat had as --store.")
    from ..prefix_store import StoredPrompts

    return StoredPrompts(folder)


def numbered(store: "StoredPrompts") -> list[Numbered]:
    """The prompts of a store, the one used last first; raises `PrefixStoreFolderError` if it cannot be read."""
    return [Numbered(number, stored) for number, stored in enumerate(store.prompts(), 1)]


def chosen(listed: Iterable[Numbered], which: str) -> Numbered:
    """
    The one that a number, the name of a conversation, or the first digits of an id, at least four, name.

    Raises:
        UsageError: they name none, or several.
    """
    listed = list(listed)
    named = [each for each in listed if which in (str(each.number), each.name)]
    if not named and len(which) >= _SHORTEST_ID:  # in Python a prompt has the id of what is stored
        start = which.lower()
        named = [each for each in listed if each.id.startswith(start) or each.stored.id.startswith(start)]
    if len(named) == 1:
        return named[0]
    count = "none" if not named else f"{len(named):,}"
    way_out = "give a number of the list, a name, or more digits of an id"
    raise UsageError(f"{which!r} names {count} of {len(listed):,}: {way_out}.")


def table_of(listed: Iterable[Numbered], console: Console) -> str:
    """A table with a line for each, as wide as a terminal; what is empty for all, or has no room there, is left out."""
    columns = {heading: texts for heading, *texts in zip(_HEADINGS, *(each.row for each in listed), strict=True)}
    columns = {heading: texts for heading, texts in columns.items() if any(texts) or heading == "title"}
    widths = {heading: max(map(cell_len, (heading, *texts))) for heading, texts in columns.items()}
    if console.is_terminal:
        for heading in _LESS_WANTED:
            if sum(widths.values()) - widths["title"] + 2 * len(widths) + _LEAST_TITLE > console.width:
                widths.pop(heading, None)
        room = console.width - sum(width + 2 for heading, width in widths.items() if heading != "title")
        widths["title"] = max(min(widths["title"], room), 1)
    lines = [*zip(*([heading, *columns[heading]] for heading in widths), strict=True)]
    return "\n".join("  ".join(map(_cell, line, widths, widths.values())).rstrip() for line in lines)


def _cell(text: str, heading: str, width: int) -> str:
    """A text in a column of a table, cut to its width."""
    if cell_len(text) > width:
        text = f"{set_cell_size(text, width - 1)}…"
    padding = " " * (width - cell_len(text))
    return padding + text if heading in _NUMBERS else text + padding


@with_options
def store(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to --store.")],
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER|NAME|ID",
            help="Remove the one with this number or id, and what of it no other one shares; may be repeated.",
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|NAME|ID", help="Print a conversation, without its document, as Markdown, or with --json."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files, and remove damaged ones; the exit code is 1 then.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each.")] = False,
) -> None:
    """
    List what a prefix store keeps.

    Prompts and conversations are numbered from the one used last on. Each size has what several share, too.
    """
    out, notes = consoles()
    with exit_codes(notes):
        prompts = existing_store(folder)
        if verify:
            _verify(folder, notes)
        listed = numbered(prompts)
        if remove:
            for each in [chosen(listed, which) for which in remove]:
                prompts.remove(each.stored)
                note(notes, f"removed: {each.kind} {each.number}, {each.stored.name}")
        elif export is not None:
            _export(chosen(listed, export), as_json, out)
        elif as_json:
            for each in listed:
                print_json(out, each.fields)
        elif listed and not verify:
            write(out, f"{table_of(listed, out)}\n")
        elif not verify:
            note(notes, f"{prompts.path} keeps nothing")


def _export(exported: Numbered, as_json: bool, out: Console) -> None:
    """Print the questions and answers of a conversation; raises `UsageError` for a prompt, which has none."""
    talk = exported.stored.details.get("conversation")
    if talk is None or not exported.stored.is_conversation:
        raise UsageError(f"{exported.stored.name} is no conversation of this version, so it has no text to export.")
    texts = [(question, answer) for question, answer, *_ in talk["turns"]]
    if as_json:
        system = exported.stored.details.get("system")
        messages = [("system", system)] * bool(system)
        messages += [pair for question, answer in texts for pair in (("user", question), ("assistant", answer))]
        print_json(
            out,
            exported.fields | {"messages": [dict(zip(("role", "content"), each, strict=True)) for each in messages]},
        )
        return
    write(out, f"# {exported.stored.name}\n")
    for question, answer in texts:
        write(out, f"\n**{question}**\n\n{answer.strip()}\n")


def _verify(folder: Path, notes: Console) -> None:
    """Read all files and remove damaged ones; ends the command with exit code 1 if there were any."""
    from ..prefix_store import PrefixStore  # which knows what its files say, and imports torch

    damages = PrefixStore(folder).verify()
    note(notes, f"damaged files: {len(damages):,}" + (", which were removed" if damages else ""))
    if damages:
        raise typer.Exit(1)
