"""
Attention to parts of a sequence, merged into attention to all of it.

What a part gives, and the log of the sum of its exponentials, say all that is needed of it (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

import torch

_LOWEST = torch.finfo(torch.float32).min


def merged_at_once(outs: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """
    What attention to all parts gives, of parts that are all there.

    Args:
        outs: float32 `[parts, ..., head_dim]`, see `MergedAttention.add`.
        log_sums: float32 `[parts, ...]`.

    Returns:
        float32 `[..., head_dim]`; zeros where no part has a token that is seen.
    """
    # Where no part has a token that is seen the weights are any, of zeros.
    weights = log_sums.clamp_min(_LOWEST).softmax(dim=0)
    return (outs * weights.unsqueeze(-1)).sum(dim=0)


class MergedAttention:
    """
    What attention to all parts so far gives.

    Attributes:
        out: `[batch, heads, rows, head_dim]`; `None` before the first part.
        log_sums: `[batch, heads, rows]`, natural log of the sum of the exponentials of all scores; likewise.
    """

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None
        self.log_sums: torch.Tensor | None = None

    def add(self, out: torch.Tensor, log_sums: torch.Tensor) -> None:
        """
        Attend to another part, too.

        Args:
            out: `[batch, heads, rows, head_dim]`, softmax of that part's scores times its values.
            log_sums: `[batch, heads, rows]`, natural log of the sum of the exponentials of that part's scores; minus
                infinity where none of its tokens is seen.
        """
        if self.out is None or self.log_sums is None:
            self.out, self.log_sums = out, log_sums
            return
        share = torch.sigmoid(log_sums - self.log_sums).masked_fill_(log_sums.isneginf(), 0)
        self.out = self.out.float().lerp_(out.float(), share.unsqueeze(-1))
        self.log_sums = torch.logaddexp(self.log_sums, log_sums)
