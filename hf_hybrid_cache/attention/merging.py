"""
Attention to parts of a sequence, merged into attention to all of it.

What a part gives, and the log of the sum of its exponentials, say all that is needed of it (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

from typing import NamedTuple

import torch

_LOWEST = torch.finfo(torch.float32).min


class Found(NamedTuple):
    """
    What attention to a part gives.

    Attributes:
        out: `[batch, heads, rows, head_dim]`, softmax of the part's scores times its values.
        log_sums: float32, or float64, `[batch, heads, rows]`, natural log of the sum of the exponentials of the part's
            scores; minus infinity where none of its tokens is seen.
    """

    out: torch.Tensor
    log_sums: torch.Tensor


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """float64 if one of them is of it, else float32."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def merged_at_once(outs: torch.Tensor, log_sums: torch.Tensor) -> Found:
    """
    What attention to all parts gives, of parts that are all there.

    Args:
        outs: float32 `[parts, ..., head_dim]`, see `Found`.
        log_sums: float32 `[parts, ...]`.

    Returns:
        float32 `[..., head_dim]`, zeros where no part has a token that is seen, and `[...]`.
    """
    # Where no part has a token that is seen the weights are any, of zeros.
    weights = log_sums.clamp_min(_LOWEST).softmax(dim=0)
    return Found((outs * weights.unsqueeze(-1)).sum(dim=0), log_sums.logsumexp(dim=0))


class MergedAttention:
    """
    What attention to all parts so far gives.

    Attributes:
        found: of all; `None` before the first part.
    """

    def __init__(self) -> None:
        self.found: Found | None = None

    def add(self, part: Found) -> None:
        """Attend to another part, too; what the first one gave may be written to."""
        if self.found is None:
            self.found = part
            return
        log_sums = torch.logaddexp(self.found.log_sums, part.log_sums)
        self.found = Found(self.out_with(part), log_sums)

    def out_with(self, last: Found, is_masked: bool = True) -> torch.Tensor:
        """
        What attention to all parts and a last one gives.

        Args:
            last: that part.
            is_masked: some row may see no token of a part. Each operation counts where attention has just taken all
                caches of the processor.
        """
        assert self.found is not None
        share = torch.sigmoid(last.log_sums - self.found.log_sums)
        if is_masked:
            share.masked_fill_(last.log_sums.isneginf(), 0)
        dtype = widest(self.found.out, last.out)
        return self.found.out.to(dtype).lerp_(last.out.to(dtype), share.unsqueeze(-1).to(dtype))
