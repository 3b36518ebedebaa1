"""`hf-hybrid-cache kept`: its options."""

from pathlib import Path
from typing import Annotated

import typer


def kept(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to --keep.")],
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER|ID",
            help="Remove the one with this number or id, and what of it no other one shares; may be repeated.",
        ),
    ] = None,
    remove_all: Annotated[bool, typer.Option("--remove-all", help="Remove all.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read all files, and remove damaged ones; the exit code is 1 then."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each.")] = False,
) -> None:
    """
    List the prompts and conversations in a folder.

    The one used last is number 1. Each size has what several share, too.
    """
    from ..console import UsageError
    from ..distributed.group import consoles
    from ..earlier_console import exit_codes
    from .kept import list_kept, remove_kept, verify_kept
    from .kept_list import existing_store

    out, notes = consoles()
    with exit_codes(notes):
        if as_json and (verify or remove or remove_all):
            raise UsageError("--json is of the list: drop it, or --remove, --remove-all and --verify.")
        prompts = existing_store(folder)
        if verify:
            verify_kept(prompts, notes)
        if remove or remove_all:
            remove_kept(prompts, remove or [], remove_all, notes)
        if not (verify or remove or remove_all):
            list_kept(prompts, as_json, out, notes)
