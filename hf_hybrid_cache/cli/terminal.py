"""Text on a terminal: tokens as they come, and files that are read."""

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase, TextStreamer

from .console import UsageError


class TokenStream:
    """Writes tokens as they come: words with a tokenizer, token numbers without."""

    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase | None):
        self._out = out
        self._words = _Words(out, tokenizer) if tokenizer else None

    def put(self, token: int) -> None:
        if self._words:
            self._words.put(torch.tensor([token]))
        else:
            write(self._out, f"{token} ")

    def end(self) -> None:
        if self._words:
            self._words.end()
        write(self._out, "\n")


class _Words(TextStreamer):
    def __init__(self, out: Console, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        write(self._out, text)


def write(out: Console, text: str) -> None:
    # A model can produce any character, and an escape sequence would act on the terminal.
    text = "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
    out.print(text, end="", markup=False, highlight=False, emoji=False)
    out.file.flush()


@dataclass(frozen=True)
class PrefillBar:
    """Shows how much of a prompt is computed."""

    progress: Progress
    task: TaskID

    def advance(self, num_tokens: int) -> None:
        self.progress.advance(self.task, num_tokens)

    def stop(self) -> None:
        self.progress.stop()


@contextmanager
def prefill_bar(notes: Console, title: str, num_tokens: int) -> Iterator[PrefillBar]:
    """On a terminal, a bar of so many tokens."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_interactive) as progress:
        yield PrefillBar(progress, progress.add_task(title, total=num_tokens))


def is_encodable(text: str) -> bool:
    """Whether it is text throughout: what a terminal passes on in another encoding is not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text(path: Path) -> str:
    try:
        text = sys.stdin.buffer.read().decode() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start:,} is {error.object[error.start]:#04x})."
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not the name of a file: {error}.") from error
    if "\0" in text:
        raise UsageError(f"{path} is a binary file, not text.")
    if not text.strip():
        raise UsageError(f"{path} is empty.")
    return text
