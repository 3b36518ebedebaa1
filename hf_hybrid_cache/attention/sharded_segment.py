"""The tokens of all processes of a group: each attends to its shard, and the partial results are merged."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..storage import MARK_SIZE, ShardedStore
from .chunk_attention import attend_in_pieces, has_lse
from .host_kernel import MAX_QUERIES, HostKernel, has_kernel_for_many
from .masks import LastMask, mask_arrays
from .merging import PartialAttention, merged_at_once
from .segment import AttentionSegment, Queries

# Cost of a round of messages, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


class ShardedSegment(AttentionSegment):
    """
    All tokens of a sequence whose blocks are distributed over processes; all of them attend to it at once.

    Args:
        queries: that attend.
        mask: see `AttentionSegment`.
        store: holds the own shard.
        kernel: that attends to it.
        own_masks: makes the mask of the own shard.
    """

    def __init__(
        self,
        queries: Queries,
        mask: torch.Tensor | None,
        store: ShardedStore,
        kernel: HostKernel,
        own_masks: LastMask[torch.Tensor | None],
    ):
        super().__init__(queries._replace(states=queries.states.cpu()), own_masks.of(mask))
        self._given = queries.states
        self._store, self._kernel = store, kernel

    def partial(self) -> PartialAttention:
        rows = ShardedRows(self._queries.states.shape[:3], self._store.shape.value_dim)
        self._attend_to_shard(rows)
        out, lse = rows.merged(self._store)
        return PartialAttention(out.to(self._given.device), lse.to(self._given.device))

    def _attend_to_shard(self, partial: "ShardedRows") -> None:
        """Write the partial result of the own shard."""
        (query, group, scale, _), store, mask = self._queries, self._store, self._mask
        length = query.shape[2]
        if not store.middle_tokens:
            partial.out.zero_()
            partial.lse.fill_(-torch.inf)
            return
        if length > MAX_QUERIES and has_kernel_for_many(store.shape):
            out, lse = self._kernel.attend_many(self._queries, store, self._kernel.seen.of(mask), torch.float32)
            partial.out.copy_(out)
            partial.lse.copy_(lse)
            return
        if length > MAX_QUERIES and has_lse(store, mask):
            cut = store.shard.tokens(store.num_tokens - length)
            out, lse = attend_in_pieces(query, store, group, mask, scale, cut)
            partial.out.copy_(out)
            partial.lse.copy_(lse)
            return
        for start in range(0, length, MAX_QUERIES):
            few = slice(start, start + MAX_QUERIES)
            seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, few]
            arrays = self._kernel.masks.of(seen) if length <= MAX_QUERIES else mask_arrays(seen)
            workspace = self._kernel.attend(Queries(query[:, :, few], group, scale), store, arrays)
            partial.out[:, :, few].copy_(workspace.out.flatten(1, 2))
            partial.lse[:, :, few].copy_(workspace.lse.flatten(1, 2))


class ShardedRows:
    """
    The partial result of a shard, in the message to the other processes.

    Args:
        shape: batch, query heads, query length.
        value_dim: width of a value.

    Attributes:
        out: float32 `[*shape, value_dim]`, to be written: attention to the own shard.
        lse: float32 `shape`, to be written, see `PartialAttention`.
    """

    def __init__(self, shape: Sequence[int], value_dim: int):
        self._shape = (*shape, value_dim)
        self._width = value_dim + 1
        self._count = torch.Size(shape).numel()
        self._message = torch.empty(self._count * self._width + MARK_SIZE)
        rows = self._message[:-MARK_SIZE].view(*shape, self._width)
        self.out, self.lse = rows[..., :-1], rows[..., -1]

    def merged(self, store: ShardedStore) -> PartialAttention:
        """
        Merge to attention to all tokens. All processes call this at once; those of one kind get the same bits.

        With few numbers, every process sends its own to all others, and all merge them: one round. With many, each
        process merges some of the rows and sends the merged ones to the others: two rounds.

        Args:
            store: whose shard was attended to.

        Returns:
            float32 `[*shape, value_dim]`, and `shape`.

        Raises:
            LostProcessError: another process has ended, or does not answer.
            OutOfStepError: it computes something else.
        """
        peers, message = store.peers, self._message
        mark = message[-MARK_SIZE:]
        mark.copy_(torch.tensor(store.mark()))
        sent_too_often = (peers.size - 1) * message.nbytes * (1 - 2 / peers.size)
        if sent_too_often < _WORTH_A_ROUND:
            return self._seen(self._merged(store, peers.exchange(message)))
        of_each = -(-self._count // peers.size)
        rows = message[:-MARK_SIZE].view(self._count, self._width)
        parts = pad(rows, (0, 0, 0, of_each * peers.size - self._count)).view(peers.size, -1)
        heard = peers.trade(torch.cat([parts, mark.expand(peers.size, -1)], dim=1))
        merged = peers.exchange(self._merged(store, heard))
        return self._seen(merged.flatten(0, 1)[: self._count])

    def _merged(self, store: ShardedStore, heard: torch.Tensor) -> torch.Tensor:
        """Merge the messages of all processes, `[size, rows and mark]`, to rows `[rows, value_dim + 1]`."""
        store.require_same(heard[:, -MARK_SIZE:].tolist())
        rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, self._width))
        # In the order of ranks.
        out, lse = merged_at_once(rows[..., :-1], rows[..., -1])
        return torch.cat([out, lse.unsqueeze(-1)], dim=-1)

    def _seen(self, rows: torch.Tensor) -> PartialAttention:
        """Return all of these rows as a result of attention."""
        rows = rows.view(*self._shape[:-1], self._width)
        return PartialAttention(rows[..., :-1], rows[..., -1])
