"""Whether two texts begin alike."""

import torch


def first_difference(known: torch.Tensor, given: torch.Tensor) -> tuple[int, int] | None:
    """The sequence and the position of the first token ids `[batch, tokens]` that differ, of two of the same shape."""
    different = (given != known).nonzero()
    if not len(different):
        return None
    sequence, position = different[different[:, 1].argmin()].tolist()
    return sequence, position
