"""States in two pieces, seen as one sequence."""

import torch


class JoinedStates:
    """
    Two pieces of states, seen as one sequence; a slice copies only its own tokens.

    Args:
        before: `[batch, num_kv_heads, tokens, head_dim]`.
        after: states of the tokens that follow, in the same shape.
    """

    def __init__(self, before: torch.Tensor, after: torch.Tensor):
        self._before, self._after = before, after

    def __len__(self) -> int:
        return self._before.shape[2] + self._after.shape[2]

    def __getitem__(self, tokens: slice) -> torch.Tensor:
        border = self._before.shape[2]
        start, end, _ = tokens.indices(len(self))
        if start >= border:
            return self._after[:, :, start - border : end - border]
        first = self._before[:, :, start : min(end, border)]
        return first if end <= border else torch.cat([first, self._after[:, :, : end - border]], dim=2)
