"""Answers on standard output, remarks and errors on standard error, exit codes, and Ctrl-C."""

import contextlib
import json
import os
import signal
import sys
import unicodedata
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from ..errors import HybridCacheError

# Consoles whose last line is not ended: a remark that goes where they write begins with a new one.
_with_open_line = weakref.WeakSet[Console]()
# Control characters act on a terminal, and many programs end a line at a separator.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


class UsageError(HybridCacheError, ValueError):
    """An option or a file has an unusable value; the message names it and the way out."""


def consoles(quiet: bool = False) -> tuple[Console, Console]:
    """A console for answers and one for remarks, which prints none if `quiet`."""
    # Without colors rich would still make remarks dim.
    colors: Any = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(soft_wrap=True, **colors), Console(stderr=True, soft_wrap=True, quiet=quiet, **colors)


def without_controls(text: str) -> str:
    """Text without control characters, with which a model or a title could steer the terminal."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def note(notes: Console, text: str) -> None:
    """Print a remark, without control characters, on a line of its own."""
    if not notes.quiet:
        for console in list(_with_open_line):
            if _have_one_file(console, notes):
                end_line(console)
    notes.print(_naming_options(without_controls(text)), markup=False, highlight=False, emoji=False, style="dim")


def think(notes: Console, piece: str) -> None:
    """Print a piece of a thought among remarks; the empty one at its end parts it from the answer."""
    text = without_controls(piece or "\n\n")
    notes.print(text, markup=False, highlight=False, emoji=False, style="dim", end="")
    _note_end(notes, text)


def write(out: Console, text: str) -> None:
    """Write a text as it is, without control characters and without a new line at its end."""
    if not out.quiet:
        out.file.write(without_controls(text))  # rich would write spaces for a tab
        out.file.flush()
        _note_end(out, text)


def end_line(out: Console) -> None:
    """End a line, unless a remark or the text itself has ended it."""
    if out in _with_open_line:
        write(out, "\n")


def _note_end(console: Console, text: str) -> None:
    """Take note whether the last line of a console is ended after a text."""
    if text and not console.quiet:
        (_with_open_line.discard if text.endswith("\n") else _with_open_line.add)(console)


def _have_one_file(first: Console, second: Console) -> bool:
    """Return whether two consoles write to the same terminal, file or pipe."""
    with contextlib.suppress(OSError, ValueError):  # not files
        return first.file is second.file or os.path.sameopenfile(first.file.fileno(), second.file.fileno())
    return False


def json_line(value: Any) -> str:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_ESCAPES) + "\n"


def print_json(out: Console, value: Any) -> None:
    """Print a value as a line of JSON."""
    write(out, json_line(value))


def strict_json(line: str) -> Any:
    """
    Parse JSON that can be written again as it is: each key is given once, numbers are finite, text is UTF-8.

    Raises:
        ValueError: it is not such JSON.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(line, object_pairs_hook=_with_keys_once)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse an object of JSON, see `strict_json`; raises `ValueError` for anything else."""
    if not isinstance(value := strict_json(text), dict):
        raise ValueError(f'an object of JSON is needed, such as {{"name": 1}}, got {text}')
    return value


def _with_keys_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values; raises `ValueError` if a key is given twice."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key!r} is given twice")
        fields[key] = value
    return fields


def out_of_memory(error: Exception) -> str:
    """The sentence of an error that says that memory is full; raises any other error again."""
    from ..chat import is_out_of_memory  # torch, which it imports, is there where its errors come from

    if not is_out_of_memory(error):
        raise error
    return next(iter(str(error).splitlines()), "") or "Out of memory. Use a shorter --context."


def fail(message: str) -> typer.Exit:
    """Print an error, also where remarks are quiet, and return the exception to raise, of exit code 2."""
    text = _naming_options(without_controls(f"error: {message}"))
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False, emoji=False)
    return typer.Exit(2)


@contextmanager
def exit_codes(notes: Console) -> Iterator[None]:
    """Turn errors that a user can correct into a message on stderr and exit code 2, and Ctrl-C into exit code 130."""
    never_quiet = Console(stderr=True, soft_wrap=True) if notes.quiet else notes

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        note(never_quiet, f"warning: {message}")  # without a file and a line of code

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except HybridCacheError as error:
        raise fail(str(error)) from error
    except typer.Exit:  # a RuntimeError, too
        raise
    except (MemoryError, RuntimeError) as error:
        raise fail(out_of_memory(error)) from error


def _naming_options(message: str) -> str:
    """A message of the store with the option that sets its limit, instead of the argument in Python."""
    return message.replace("Raise max_bytes", "Raise --store-max")


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process at once from here on; files are written whole, so no work is left half-done."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets it be ignored
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` meanwhile: it ends an answer of a conversation, not the process."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)  # a bar may be there, and the shell goes on beside it
    os._exit(130)
