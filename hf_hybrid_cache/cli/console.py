"""Remarks on stderr, errors as exit codes, and checks of options that several commands have."""

import unicodedata
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..errors import HybridCacheError
from .choices import BITS, CACHES, DTYPES
from .distributed.ranks import num_processes, rank
from .interrupts import as_exceptions

if TYPE_CHECKING:
    import torch

# RuntimeErrors of the CPU allocators
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class UsageError(HybridCacheError, ValueError):
    """An option has an unusable value; the message names it and the way out."""


def out_of_memory(error: Exception) -> str:
    """The sentence of an error that says that memory is full; raises any other error again."""
    from ..layers import DeviceMemoryError

    is_memory = isinstance(error, MemoryError | DeviceMemoryError)
    if not is_memory and not any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY):
        raise error
    return next(iter(str(error).splitlines()), "") or "Out of memory. Use a shorter --context."


def without_controls(text: str) -> str:
    """Text without control characters, with which a model or a title could steer the terminal."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def note(notes: Console, text: str) -> None:
    """Print a remark, without control characters."""
    notes.print(without_controls(text), markup=False, highlight=False, emoji=False, style="dim")


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """
    Check that the value of an option is one of the choices.

    Raises:
        UsageError: it is not.
    """
    if value not in choices:
        raise UsageError(f"{option} {value!r} is not one of {', '.join(choices)}.")


def check_bits(bits: int | None) -> None:
    """
    Check that a cache can have so many bits.

    Raises:
        UsageError: it cannot.
    """
    if bits not in (None, *BITS):
        raise UsageError(f"--bits must be 8, 4 or 2, got {bits}.")


def cache_of_ours(cache: str | None, bits: int | None) -> str:
    """
    The cache that `--cache` and `--bits` name together; "dynamic" without either.

    Raises:
        UsageError: there is no such cache in this package, or it has no bits.
    """
    name = cache or ("dynamic" if bits is None else "quantized")
    check_choice("--cache", name, CACHES[1:])
    check_bits(bits)
    if bits is not None and name != "quantized":
        raise UsageError(f"--bits is for --cache quantized, and the cache is {name}: drop one of them.")
    return name


def require_one_process(command: str) -> None:
    """
    Check that `torchrun` did not start several processes.

    Raises:
        UsageError: it did.
    """
    if num_processes() > 1:
        raise UsageError(f"{command} runs in one process: start it without torchrun. generate shares its cache out.")


def dtype_of(option: str | None) -> "torch.dtype | None":
    """
    The type that `--dtype` names; `None` without the option.

    Raises:
        UsageError: there is no such type.
    """
    import torch

    if option is None:
        return None
    check_choice("--dtype", option, DTYPES)
    dtype: torch.dtype = getattr(torch, option)
    return dtype


@contextmanager
def exit_codes(notes: Console) -> Iterator[None]:
    """Turn errors that a user can correct into a message on stderr and exit code 2, and Ctrl-C into exit code 130."""
    try:
        with as_exceptions(), _warnings_as_remarks(notes):
            yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except HybridCacheError as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        message = out_of_memory(error)
    else:
        return
    # Each of several processes prints its own error.
    who = f"rank {rank()}: " if num_processes() > 1 else ""
    _never_quiet(notes).print(without_controls(f"{who}error: {message}"), markup=False, highlight=False, emoji=False)
    raise typer.Exit(2)


@contextmanager
def _warnings_as_remarks(notes: Console) -> Iterator[None]:
    """Print warnings without a file and a line of code, on a line of their own: they may come in an answer."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        note(_never_quiet(notes), f"\nwarning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _never_quiet(notes: Console) -> Console:
    return Console(stderr=True, soft_wrap=True) if notes.quiet else notes
