"""
Partial attention to segments of a sequence, merged into attention to all of it.

The output of a segment and its lse (log-sum-exp of the scores) are all that merging needs (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

from typing import NamedTuple

import numpy as np
import torch

_LOWEST = torch.finfo(torch.float32).min


class PartialAttention(NamedTuple):
    """
    The result of attention to one segment.

    Attributes:
        out: `[batch, heads, rows, head_dim]`, softmax of the segment's scores times its values.
        lse: float32, or float64, `[batch, heads, rows]`, natural log of the sum of the exponentials of the
            segment's scores; minus infinity where none of its tokens is seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def merged_at_once(outs: torch.Tensor, lse: torch.Tensor) -> PartialAttention:
    """
    Merge partial results in one tensor.

    Args:
        outs: float32 `[segments, ..., head_dim]`, see `PartialAttention`.
        lse: float32 `[segments, ...]`.

    Returns:
        float32 `[..., head_dim]`, zeros where no token of any segment is seen, and `[...]`.
    """
    # If no token is seen, the weights do not matter: all outputs are zero.
    weights = lse.clamp_min(_LOWEST).softmax(dim=0)
    return PartialAttention((outs * weights.unsqueeze(-1)).sum(dim=0), lse.logsumexp(dim=0))


class MergedAttention:
    """
    Partial results, merged one after the other.

    Attributes:
        partial: merged result of all segments so far; `None` before the first one.
    """

    def __init__(self) -> None:
        self.partial: PartialAttention | None = None

    def add(self, partial: PartialAttention) -> None:
        """Merge another partial result; the tensors of the first one may be written to."""
        if self.partial is None:
            self.partial = partial
            return
        lse = torch.logaddexp(self.partial.lse, partial.lse)
        self.partial = PartialAttention(self.out_with(partial), lse)

    def out_with(self, last: PartialAttention, is_masked: bool = True) -> torch.Tensor:
        """
        Return the output of all segments and a last one.

        Args:
            last: partial result of the last segment.
            is_masked: some row may see no token of a segment. Without masks one operation less is needed, and each
                counts where attention has just used all caches of the processor.
        """
        assert self.partial is not None
        weight = torch.sigmoid(last.lse - self.partial.lse)
        if is_masked:
            weight.masked_fill_(last.lse.isneginf(), 0)
        dtype = widest(self.partial.out, last.out)
        return self.partial.out.to(dtype).lerp_(last.out.to(dtype), weight.unsqueeze(-1).to(dtype))


def merged_in_place(first: PartialAttention, last: PartialAttention) -> torch.Tensor:
    """
    Return the output of two segments on the CPU; both outputs are overwritten.

    The bits of a row depend on that row alone. Those of torch's exponentials depend on where in a tensor a number is:
    the last numbers of a thread do not fill a vector, and are computed in another way.
    """
    with np.errstate(all="ignore"):
        ratio = np.exp(last.lse.numpy() - first.lse.numpy())
        weights = 1 / (1 + ratio), 1 / (1 + 1 / ratio)
    for (out, lse), weight in zip((first, last), weights, strict=True):
        weight[np.isneginf(lse.numpy())] = 0  # no token of the segment is seen
        out.mul_(torch.from_numpy(weight).unsqueeze(-1))
    return first.out.add_(last.out)
