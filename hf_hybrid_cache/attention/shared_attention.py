"""Attention of several processes, each to its share of the tokens, merged into attention to all of them."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..storage import MARK_SIZE, SharedStore
from .merging import merged_at_once

# What a round of messages costs, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


class SharedRows:
    """
    What a process finds in its share, in the message that tells the others.

    Args:
        shape: batch, query heads, query length.
        value_dim: width of a value.

    Attributes:
        out: float32 `[*shape, value_dim]`, to be written: attention to the own share.
        log_sums: float32 `shape`, to be written, see `MergedAttention.add`.
    """

    def __init__(self, shape: Sequence[int], value_dim: int):
        self._shape = (*shape, value_dim)
        self._width = value_dim + 1
        self._count = torch.Size(shape).numel()
        self._message = torch.empty(self._count * self._width + MARK_SIZE)
        rows = self._message[:-MARK_SIZE].view(*shape, self._width)
        self.out, self.log_sums = rows[..., :-1], rows[..., -1]

    def merged(self, store: SharedStore) -> torch.Tensor:
        """
        Attention to all tokens. All processes call this at once, and those of one kind get the same to the last bit.

        Few numbers every process tells every other one, and all merge them: one round. Where that would be many bytes,
        each merges some of the rows, and tells the others what it has merged: two rounds.

        Args:
            store: whose share was attended to.

        Returns:
            float32 `[*shape, value_dim]`.

        Raises:
            LostProcessError: another process has ended, or does not answer.
            OutOfStepError: it computes something else.
        """
        peers, message = store.peers, self._message
        mark = message[-MARK_SIZE:]
        mark.copy_(torch.tensor(store.mark()))
        sent_too_often = (peers.size - 1) * message.nbytes * (1 - 2 / peers.size)
        if sent_too_often < _WORTH_A_ROUND:
            return self._merged(store, peers.exchange(message)).view(self._shape)
        of_each = -(-self._count // peers.size)
        rows = message[:-MARK_SIZE].view(self._count, self._width)
        parts = pad(rows, (0, 0, 0, of_each * peers.size - self._count)).view(peers.size, -1)
        heard = peers.trade(torch.cat([parts, mark.expand(peers.size, -1)], dim=1))
        merged = peers.exchange(self._merged(store, heard))
        return merged.flatten(0, 1)[: self._count].view(self._shape)

    def _merged(self, store: SharedStore, heard: torch.Tensor) -> torch.Tensor:
        """Rows `[rows, value_dim]` of what processes have told, `[size, rows and mark]`."""
        store.require_same(heard[:, -MARK_SIZE:].tolist())
        rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, self._width))
        # In the order of ranks.
        return merged_at_once(rows[..., :-1], rows[..., -1])
