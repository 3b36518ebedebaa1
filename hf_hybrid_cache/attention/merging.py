"""
Attention to parts of a sequence, merged into attention to all of it.

What a part gives, and the log of the sum of its exponentials, say all that is needed of it (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

import torch


class MergedAttention:
    """
    What attention to all parts so far gives.

    Attributes:
        out: `[batch, heads, rows, head_dim]`; `None` before the first part.
    """

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None

    def add(self, out: torch.Tensor, log_sums: torch.Tensor) -> None:
        """
        Attend to another part, too.

        Args:
            out: `[batch, heads, rows, head_dim]`, softmax of that part's scores times its values.
            log_sums: `[batch, heads, rows]`, natural log of the sum of the exponentials of that part's scores; minus
                infinity where none of its tokens is seen.
        """
        if self.out is None:
            self.out, self._log_sums = out, log_sums
            return
        share = torch.sigmoid(log_sums - self._log_sums).masked_fill_(log_sums.isneginf(), 0)
        self.out = self.out.float().lerp_(out.float(), share.unsqueeze(-1))
        self._log_sums = torch.logaddexp(self._log_sums, log_sums)
