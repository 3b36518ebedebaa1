"""What commands that are not yet on `options` check; it goes with the last of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from .console import UsageError
from .console import exit_codes as exit_codes_of_all
from .distributed.ranks import num_processes
from .interrupts import as_exceptions
from .options import BITS, CACHES, check_choice, torch_dtype_of

if TYPE_CHECKING:
    import torch


def check_bits(bits: int | None) -> None:
    check_choice("--bits", bits, BITS)


def cache_of_ours(cache: str | None, bits: int | None) -> str:
    name = cache or ("dynamic" if bits is None else "quantized")
    check_choice("--cache", name, CACHES[1:])
    check_bits(bits)
    if bits is not None and name != "quantized":
        raise UsageError(f"--bits is for --cache quantized, and the cache is {name}: drop one of them.")
    return name


def require_one_process(command: str) -> None:
    if num_processes() > 1:
        raise UsageError(f"{command} runs in one process: start it without torchrun. generate shares its cache out.")


def dtype_of(option: str | None) -> "torch.dtype | None":
    check_choice("--dtype", option, ("float32", "bfloat16", "float16"))
    return torch_dtype_of(option)


@contextmanager
def exit_codes(notes: Console) -> Iterator[None]:
    with exit_codes_of_all(notes), as_exceptions():
        yield
