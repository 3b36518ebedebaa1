"""A segment: some of the tokens of a layer, attended to where they are stored."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from .merging import PartialAttention


class Queries(NamedTuple):
    """
    The queries of one attention call.

    Attributes:
        states: `[batch, query_heads, query_length, head_dim]`, on any device.
        group: query heads that share a KV head.
        scale: of the scores; `None` for `head_dim ** -0.5`.
        are_causal: they are the last tokens of the sequence, and each sees the tokens before it and itself.
    """

    states: torch.Tensor
    group: int
    scale: float | None
    are_causal: bool = False


class AttentionSegment(ABC):
    """
    Some of the tokens of a layer. One subclass for each place that attends; made anew for each call.

    Args:
        queries: that attend.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, query_length,
            tokens]` of this segment's tokens, where any of the first three may be 1.
    """

    def __init__(self, queries: Queries, mask: torch.Tensor | None):
        self._queries, self._mask = queries, mask

    def begin(self) -> None:  # noqa: B027
        """Start work that runs beside this thread, if there is any."""

    def note_issued(self) -> None:  # noqa: B027
        """Note that the device work of all other segments is issued."""

    @abstractmethod
    def partial(self) -> PartialAttention:
        """Attend; the output is `[batch, query_heads, query_length, value_dim]`, on the device of the queries."""

    def end(self) -> None:  # noqa: B027
        """Wait for work that still runs, because nobody will ask for its result."""

    def attend(self) -> torch.Tensor:
        """Attend where this is the only segment; the output has the type of the queries."""
        states = self._queries.states
        return self.partial().out.to(states.dtype)


def rows_of_mask(mask: torch.Tensor, shape: torch.Size, group: int) -> torch.Tensor:
    """Reshape a mask of queries of `shape` to one of the rows `[batch, num_kv_heads, group * query_length, tokens]`."""
    _, heads, length, _ = shape
    if mask.shape[1] == 1:
        return mask.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
    return mask.expand(-1, -1, length, -1).reshape(-1, heads // group, group * length, mask.shape[3])
