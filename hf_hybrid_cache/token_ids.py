"""Converting the token ids of users, and comparing them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

TokenIds = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


def as_token_ids(name: str, given: Any) -> torch.Tensor:
    """
    Return token ids as a tensor, `[batch, tokens]`.

    Args:
        name: of the argument, for the error.
        given: such a tensor, or one sequence `[tokens]`, as a tensor or a list, or a list of sequences of one length.

    Raises:
        ValueError: it is something else; the message says what is wanted.
    """
    if isinstance(given, Mapping) or hasattr(given, "input_ids"):
        raise ValueError(f"{name} must be the token ids alone: pass inputs['input_ids'].")
    if isinstance(given, str):
        raise ValueError(f"{name} must be token ids, got text: pass tokenizer(text, return_tensors='pt')['input_ids'].")
    try:
        token_ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be integers [batch, tokens], and cannot be a tensor: {error}") from error
    if token_ids.dim() == 1:
        token_ids = token_ids[None]
    if token_ids.dim() != 2 or token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(f"{name} must be integers [batch, tokens], got {list(token_ids.shape)} of {token_ids.dtype}.")
    return token_ids


def first_difference(known: torch.Tensor, given: torch.Tensor) -> tuple[int, int] | None:
    """Return the sequence and position of the first difference of two tensors of token ids, `[batch, tokens]`."""
    different = (given != known).nonzero()
    if not len(different):
        return None
    sequence, position = different[different[:, 1].argmin()].tolist()
    return sequence, position


def num_common(one: list[int], other: list[int]) -> int:
    """Return with how many equal token ids two lists begin."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:  # much faster than looking at each
        return most
    return next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
