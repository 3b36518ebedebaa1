"""A prefix that several sequences share: their queries attend to it at once, as more queries of one sequence."""

import torch

from .merging import PartialAttention
from .segment import AttentionSegment, Queries


def folded_queries(states: torch.Tensor, continuations: int) -> torch.Tensor:
    """Queries `[groups * continuations, heads, length, head_dim]` as `[groups, heads, continuations * length, ...]`."""
    return states.unflatten(0, (-1, continuations)).transpose(1, 2).flatten(2, 3)


def folded_mask(mask: torch.Tensor | None, continuations: int, length: int) -> torch.Tensor | None:
    """
    Return the mask of folded queries; `None` if it hides nothing.

    Args:
        mask: `[sequences, query_heads, length, tokens]`, where any of the first three may be 1.
        continuations: sequences of each group.
        length: of the queries of a sequence.
    """
    if mask is None or (mask.dtype == torch.bool and bool(mask.all())):
        return None
    if mask.shape[0] == 1:
        return mask if mask.shape[2] == 1 else mask.repeat(1, 1, continuations, 1)
    return folded_queries(mask.expand(-1, -1, length, -1), continuations)


class PrefixSegment(AttentionSegment):
    """
    Tokens that `continuations` sequences share.

    Source: cascade attention (Ye et al., 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html); Hydragen
    (Juravsky et al., 2024, https://arxiv.org/abs/2402.05099).

    Args:
        queries: of all sequences.
        segment: attends with these queries folded.
        continuations: sequences that share a prefix.
    """

    def __init__(self, queries: Queries, segment: AttentionSegment, continuations: int):
        super().__init__(queries, None)
        self._segment, self._continuations = segment, continuations

    def begin(self) -> None:
        self._segment.begin()

    def note_issued(self) -> None:
        self._segment.note_issued()

    def partial(self) -> PartialAttention:
        out, lse = self._segment.partial()
        return PartialAttention(self._unfolded(out), self._unfolded(lse))

    def end(self) -> None:
        self._segment.end()

    def _unfolded(self, rows: torch.Tensor) -> torch.Tensor:
        """`[groups, heads, continuations * length, ...]` as `[groups * continuations, heads, length, ...]`."""
        return rows.unflatten(2, (self._continuations, -1)).transpose(1, 2).flatten(0, 1)
