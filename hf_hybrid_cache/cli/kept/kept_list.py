"""The prompts and conversations in a folder, numbered from the one that was used last."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...prefix_store import KeptPrompt, PrefixStore
from ..console import UsageError, without_controls

_SHORT_ID = 8
_SHORTEST_ID = 4
# The columns of a table that have numbers.
_NUMBERS = (0, 4, 5)


@dataclass(frozen=True)
class Numbered:
    """
    A prompt, or a conversation, and its number in the list.

    Attributes:
        number: from 1 on.
        kept: the prompt.
    """

    number: int
    kept: KeptPrompt

    @property
    def kind(self) -> str:
        return "conversation" if self.kept.is_conversation else "prompt"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that `kept --json` prints."""
        kept = self.kept
        return {
            "number": self.number,
            "id": kept.id,
            "kind": self.kind,
            "model": kept.model_name,
            "tokens": len(kept.token_ids),
            "document_tokens": kept.document_tokens,
            "bytes": kept.num_bytes,
            "last_use": round(kept.last_use, 3),
            "title": kept.title,
        }


def existing_store(folder: Path) -> PrefixStore:
    """
    The store in a folder, which is not made.

    Raises:
        UsageError: there is no such folder.
        PrefixFolderError: the folder has other files, or cannot be used.
    """
    if not folder.expanduser().is_dir():
        raise UsageError(f"There is no folder {folder}: generate, batch and chat make it with --keep {folder}.")
    return PrefixStore(folder)


def numbered(prompts: PrefixStore) -> list[Numbered]:
    """
    List what is kept, the one used last first.

    Raises:
        PrefixFolderError: the folder cannot be read.
    """
    return [Numbered(number, kept) for number, kept in enumerate(prompts.kept_prompts(), 1)]


def chosen(listed: Iterable[Numbered], which: str) -> Numbered:
    """
    Return what a number, or the first digits of an id, at least four, name.

    Raises:
        UsageError: they name none, or several.
    """
    listed = list(listed)
    named = [each for each in listed if str(each.number) == which]
    named = named or [each for each in listed if len(which) >= _SHORTEST_ID and each.kept.id.startswith(which.lower())]
    if len(named) == 1:
        return named[0]
    count = "none" if not named else f"{len(named):,}"
    raise UsageError(f"{which!r} names {count} of {len(listed):,}: give a number of the list, or more digits of an id.")


def table_of(listed: Iterable[Numbered]) -> str:
    """Return a table with a line for each; titles come last, as they may be long."""
    rows = [("", "id", "kind", "model", "tokens", "MiB", "last use", "title")]
    for each in listed:
        kept = each.kept
        rows.append(
            (
                str(each.number),
                kept.id[:_SHORT_ID],
                each.kind,
                Path(kept.model_name).name,
                f"{len(kept.token_ids):,}",
                f"{kept.num_bytes / 2**20:,.1f}",
                time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.last_use)),
                " ".join(without_controls(kept.title).split()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(_padded, range(len(row)), row, widths)).rstrip() for row in rows)


def _padded(column: int, text: str, width: int) -> str:
    return text.rjust(width) if column in _NUMBERS else text.ljust(width)
