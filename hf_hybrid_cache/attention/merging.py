"""
Partial attention to some tokens of a sequence, merged into attention to all of it.

The output for some tokens and its lse (log-sum-exp of the scores) are all that merging needs (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

from typing import NamedTuple

import torch

_LOWEST = torch.finfo(torch.float32).min


class PartialAttention(NamedTuple):
    """
    The result of attention to some of the tokens.

    Attributes:
        out: `[batch, heads, rows, head_dim]`, softmax of the scores of these tokens times their values.
        lse: float32, or float64, `[batch, heads, rows]`, natural log of the sum of the exponentials of these scores;
            minus infinity where none of the tokens is seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def merged(first: PartialAttention | None, last: PartialAttention) -> PartialAttention:
    """Merge two partial results; the last one is all if there is no first one."""
    if first is None:
        return last
    return PartialAttention(merged_out(first, last), torch.logaddexp(first.lse, last.lse))


def merged_out(first: PartialAttention, last: PartialAttention, is_masked: bool = True) -> torch.Tensor:
    """
    Return the output of two partial results, in memory of its own.

    Without masks each row sees tokens of both, and one operation less is needed: each counts where attention has just
    used all caches of the processor.
    """
    weight = torch.sigmoid(last.lse - first.lse)
    if is_masked:
        weight.masked_fill_(last.lse.isneginf(), 0)
    dtype = widest(first.out, last.out)
    return torch.lerp(first.out.to(dtype), last.out.to(dtype), weight.unsqueeze(-1).to(dtype))


def merged_at_once(outs: torch.Tensor, lse: torch.Tensor) -> PartialAttention:
    """Merge partial results `[results, ..., head_dim]` and `[results, ...]`; zeros where no token is seen."""
    # If no token is seen, the weights do not matter: all outputs are zero.
    weights = lse.clamp_min(_LOWEST).softmax(dim=0)
    return PartialAttention((outs * weights.unsqueeze(-1)).sum(dim=0), lse.logsumexp(dim=0))
