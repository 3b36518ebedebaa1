"""`hf-hybrid-cache kept`: what a folder of prompts has."""

from collections.abc import Sequence

import typer
from rich.console import Console

from ...prefix_store import PrefixStore
from ..console import UsageError, note
from ..files import json_line
from ..terminal import write
from .kept_list import chosen, numbered, table_of


def list_kept(prompts: PrefixStore, as_json: bool, out: Console, notes: Console) -> None:
    """
    Print a table of what is kept, or lines of JSON.

    Raises:
        PrefixFolderError: the folder cannot be read.
    """
    listed = numbered(prompts)
    if as_json:
        for each in listed:
            write(out, json_line(each.fields))
    elif listed:
        write(out, f"{table_of(listed)}\n")
    else:
        note(notes, f"{prompts.path} keeps nothing")


def remove_kept(prompts: PrefixStore, names: Sequence[str], removes_all: bool, notes: Console) -> None:
    """
    Remove prompts and conversations.

    Args:
        prompts: in their folder.
        names: numbers of the list, or ids.
        removes_all: whether all go, without names.
        notes: receives a remark on each.

    Raises:
        UsageError: a name is not in the list; nothing is removed then.
        NodeInUseError: a process reads one now.
        PrefixFolderError: the folder cannot be changed.
    """
    if names and removes_all:
        raise UsageError("--remove-all removes all: drop --remove.")
    listed = numbered(prompts)
    for each in listed if removes_all else [chosen(listed, name) for name in names]:
        prompts.remove(each.kept)
        note(notes, f"removed: {each.kind} {each.number}, {each.kept.name}")


def verify_kept(prompts: PrefixStore, notes: Console) -> None:
    """
    Read all files, and remove those that are damaged.

    Raises:
        PrefixFolderError: the folder cannot be read, or changed.
        typer.Exit: files were damaged; the exit code is 1.
    """
    damages = prompts.verify()
    note(notes, f"damaged files: {len(damages):,}" + (", which were removed" if damages else ""))
    if damages:
        raise typer.Exit(1)
