"""Attention of several processes, each to its share of the tokens, merged into attention to all of them."""

import torch
from torch.nn.functional import pad

from ..storage import MARK_SIZE, SharedStore
from .merging import merged_at_once

# What a round of messages costs, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


def merged_together(store: SharedStore, out: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """
    Attention to all tokens. All processes call this at once, and those of one kind get the same result to the last bit.

    Few numbers every process tells every other one, and all merge them: one round. Where that would be many bytes, each
    merges some of the rows, and tells the others what it has merged: two rounds.

    Args:
        store: whose share was attended to.
        out: float32 `[batch, query_heads, query_length, value_dim]`, attention to the own share.
        log_sums: float32 `[batch, query_heads, query_length]`, see `MergedAttention.add`.

    Returns:
        float32, as `out`.

    Raises:
        LostProcessError: another process has ended, or does not answer.
        OutOfStepError: it computes something else.
    """
    peers = store.peers
    rows = torch.cat([out, log_sums.unsqueeze(-1)], dim=-1).flatten(0, 2)
    sent_too_often = (peers.size - 1) * rows.nbytes * (1 - 2 / peers.size)
    if sent_too_often < _WORTH_A_ROUND:
        heard = peers.exchange(torch.cat([rows.flatten(), store.mark()]))
        return _merged(store, heard, rows.shape[1]).view(out.shape)
    count = -(-len(rows) // peers.size)
    parts = pad(rows, (0, 0, 0, count * peers.size - len(rows))).view(peers.size, -1)
    marks = store.mark().expand(peers.size, -1)
    merged = _merged(store, peers.trade(torch.cat([parts, marks], dim=1)), rows.shape[1])
    return peers.exchange(merged).flatten(0, 1)[: len(rows)].view(out.shape)


def _merged(store: SharedStore, heard: torch.Tensor, width: int) -> torch.Tensor:
    """Rows `[rows, width - 1]`, of what processes have told: rows of `width` numbers, and their mark."""
    store.require_same(heard[:, -MARK_SIZE:])
    rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, width))
    # In the order of ranks.
    return merged_at_once(rows[..., :-1], rows[..., -1])
