"""Comparing the token ids of two texts."""

import torch


def first_difference(known: torch.Tensor, given: torch.Tensor) -> tuple[int, int] | None:
    """Return the sequence and position of the first difference of two tensors of token ids, `[batch, tokens]`."""
    different = (given != known).nonzero()
    if not len(different):
        return None
    sequence, position = different[different[:, 1].argmin()].tolist()
    return sequence, position
