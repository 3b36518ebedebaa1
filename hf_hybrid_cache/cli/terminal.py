"""Text on a terminal: tokens as they come."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase, TextStreamer


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


def without_controls(text: str) -> str:
    """What may be shown: a model can produce any character, and an escape sequence would act on the terminal."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def write(out: Console, text: str) -> None:
    out.print(without_controls(text), end="", markup=False, highlight=False, emoji=False)
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
