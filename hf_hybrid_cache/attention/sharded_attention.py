"""Attention to the tokens of all processes of a group: each attends to its shard, and the results are merged."""

import torch
from torch.nn.functional import pad

from ..storage import MARK_SIZE, ShardedStore
from .host_attention import MAX_QUERIES, HostAttention, has_kernel_for_many
from .merging import PartialAttention, merged_at_once
from .queries import Queries
from .torch_attention import has_lse

# Cost of a round of messages, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


def attend_to_shards(queries: Queries, store: ShardedStore, host: HostAttention) -> PartialAttention:
    """
    Attend to all tokens of a sequence whose blocks are distributed over processes. All of them call this at once.

    With few numbers, every process sends its own to all others, and all merge them: one round. With many, each process
    merges some of the rows and sends the merged ones to the others: two rounds. All get the same bits.

    The mask is that of the own shard, in host memory.

    Raises:
        LostProcessError: another process has ended, or does not answer.
        OutOfStepError: it computes something else.
    """
    query, peers = queries.states, store.peers
    shape, width = query.shape[:3], store.shape.value_dim + 1
    message = torch.empty(shape.numel() * width + MARK_SIZE)
    rows, mark = message[:-MARK_SIZE].view(*shape, width), message[-MARK_SIZE:]
    own = PartialAttention(rows[..., :-1], rows[..., -1])
    _attend_to_own(queries._replace(states=query.cpu()), store, host, own)
    mark.copy_(torch.tensor(store.mark()))
    sent_too_often = (peers.size - 1) * message.nbytes * (1 - 2 / peers.size)
    if sent_too_often < _WORTH_A_ROUND:
        all_rows = _merged(store, peers.exchange(message), width)
    else:
        of_each = -(-shape.numel() // peers.size)
        padded = pad(rows.view(-1, width), (0, 0, 0, of_each * peers.size - shape.numel()))
        heard = peers.trade(torch.cat([padded.view(peers.size, -1), mark.expand(peers.size, -1)], dim=1))
        all_rows = peers.exchange(_merged(store, heard, width)).flatten(0, 1)[: shape.numel()]
    all_rows = all_rows.view(*shape, width).to(query.device)
    return PartialAttention(all_rows[..., :-1], all_rows[..., -1])


def _attend_to_own(queries: Queries, store: ShardedStore, host: HostAttention, written: PartialAttention) -> None:
    """Write the partial result of the own shard."""
    query, mask = queries.states, queries.mask
    length = at_once = query.shape[2]
    if not store.own_tokens:
        written.out.zero_()
        written.lse.fill_(-torch.inf)
        return
    if length > MAX_QUERIES and not (has_kernel_for_many(store.shape) or has_lse(store.shape, mask)):
        at_once = MAX_QUERIES
    cut = store.shard.tokens(max(0, store.num_tokens - length))
    for start in range(0, length, at_once):
        some = slice(start, start + at_once)
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, some]
        out, lse = host.partial(queries._replace(states=query[:, :, some], mask=seen), store, cut)
        written.out[:, :, some].copy_(out)
        written.lse[:, :, some].copy_(lse)


def _merged(store: ShardedStore, heard: torch.Tensor, width: int) -> torch.Tensor:
    """Merge the messages of all processes, `[size, rows and mark]`, to rows `[rows, width]`."""
    store.require_same(heard[:, -MARK_SIZE:].tolist())
    rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, width))
    # In the order of ranks.
    out, lse = merged_at_once(rows[..., :-1], rows[..., -1])
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)
