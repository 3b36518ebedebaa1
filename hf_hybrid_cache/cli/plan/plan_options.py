"""All options of `plan`, parsed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...planning.sizes import parse_bandwidth, parse_bytes, parse_tokens
from ..console import UsageError

_T = TypeVar("_T")


@dataclass(frozen=True)
class PlanOptions:
    """
    A model, a machine, and what is printed of the plans; `None` of an option is its default.

    Attributes:
        model: a model of the Hugging Face Hub, or a folder.
        context: tokens of prompt and answer.
        gpu_memory: bytes; 0 for no GPU.
        host_memory: bytes.
        dtype: of the model.
        batch_size: sequences at once.
        continuations: sequences that continue one prompt.
        prefill_chunk_size: tokens of the prompt in each forward pass.
        calibrate: whether the speeds of this machine are measured.
        host_bandwidth: bytes a second that the CPU reads.
        gpu_bandwidth: bytes a second that the GPU reads of its memory.
        bus_bandwidth: bytes a second from host memory to the GPU.
        as_json: whether the plans are printed as JSON.

    Raises:
        UsageError: there are several prompts, and several sequences continue one.
    """

    model: str
    context: int | None
    gpu_memory: int | None
    host_memory: int | None
    dtype: torch.dtype | None
    batch_size: int
    continuations: int
    prefill_chunk_size: int | None
    calibrate: bool
    host_bandwidth: float | None
    gpu_bandwidth: float | None
    bus_bandwidth: float | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.continuations > 1 and self.batch_size > 1:
            raise UsageError(
                f"--continuations {self.continuations} continue one prompt, and --batch-size {self.batch_size} are as "
                "many prompts: drop one of them."
            )


def parsed_memory(option: str, text: str | None) -> int | None:
    """
    The bytes that an option names; `None` without it.

    Raises:
        UsageError: the text is not a size, or too small a one.
    """
    return _parsed(option, text, _parse_memory)


def parsed_bandwidth(option: str, text: str | None) -> float | None:
    """
    The bytes a second that an option names; `None` without it.

    Raises:
        UsageError: the text is not a bandwidth.
    """
    return _parsed(option, text, parse_bandwidth)


def parsed_tokens(option: str, text: str | None) -> int | None:
    """
    The tokens that an option names; `None` without it.

    Raises:
        UsageError: the text is not a number of tokens.
    """
    return _parsed(option, text, parse_tokens)


def _parsed(option: str, text: str | None, parse: Callable[[str], _T]) -> _T | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _parse_memory(size: str) -> int:
    num_bytes = parse_bytes(size)
    if 0 < num_bytes < 2**20:
        meant = f" Write {size.strip()}GiB if these are gibibytes." if size.strip().isdigit() else ""
        raise ValueError(f"{size} is {num_bytes:,} bytes, which is less than 1MiB.{meant}")
    return num_bytes
