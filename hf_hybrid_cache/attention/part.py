"""A part of a layer's tokens, attended to where it is."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from .merging import Found


class Queries(NamedTuple):
    """
    What attends to a layer.

    Attributes:
        states: `[batch, query_heads, query_length, head_dim]`, on any device.
        group: query heads that share a KV head.
        scale: of the scores; `None` for `head_dim ** -0.5`.
        are_causal: they are the last tokens of a sequence, of which each sees those before it and itself.
    """

    states: torch.Tensor
    group: int
    scale: float | None
    are_causal: bool = False


class AttentionPart(ABC):
    """
    Some of the tokens of a layer. One subclass for each place where they are attended to; made anew for each call.

    Args:
        queries: that attend.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, query_length,
            tokens]` of this part's tokens, where any of the first three may be 1.
    """

    def __init__(self, queries: Queries, mask: torch.Tensor | None):
        self._queries, self._mask = queries, mask

    def begin(self) -> None:  # noqa: B027
        """Begin, where that goes on beside this thread."""

    def note_issued(self) -> None:  # noqa: B027
        """Note that all that the other parts have to do on their device is issued."""

    @abstractmethod
    def found(self) -> Found:
        """What attention to this part gives, `[batch, query_heads, query_length, value_dim]`, on the query's device."""

    def end(self) -> None:  # noqa: B027
        """Wait, if what was begun goes on, because nobody will ask for what is found."""

    def attend(self) -> torch.Tensor:
        """What attention gives where this part is all there is, of the query's type."""
        states = self._queries.states
        return self.found().out.to(states.dtype)


def rows_of_mask(mask: torch.Tensor, shape: torch.Size, group: int) -> torch.Tensor:
    """A mask of queries of `shape` as one of the rows `[batch, num_kv_heads, group * query_length, tokens]`."""
    _, heads, length, _ = shape
    if mask.shape[1] == 1:
        return mask.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
    return mask.expand(-1, -1, length, -1).reshape(-1, heads // group, group * length, mask.shape[3])
