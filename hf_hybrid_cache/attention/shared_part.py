"""The tokens of all processes of a group: each attends to its share, and what they find is merged."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..storage import MARK_SIZE, SharedStore
from .chunk_attention import attend_in_pieces, has_log_sums
from .host_kernel import MAX_QUERIES, HostKernel, has_kernel_for_many
from .masks import LastMask, mask_arrays
from .merging import Found, merged_at_once
from .part import AttentionPart, Queries

# What a round of messages costs, in bytes that could be sent meanwhile: 50 us at 10 Gbit/s.
_WORTH_A_ROUND = 2**16


class SharedPart(AttentionPart):
    """
    All tokens of a sequence whose blocks are shared out; all processes attend to it at once.

    Args:
        queries: that attend.
        mask: see `AttentionPart`.
        store: of the own share.
        kernel: that attends to it.
        own_masks: makes the mask of the own share.
    """

    def __init__(
        self,
        queries: Queries,
        mask: torch.Tensor | None,
        store: SharedStore,
        kernel: HostKernel,
        own_masks: LastMask[torch.Tensor | None],
    ):
        super().__init__(queries._replace(states=queries.states.cpu()), own_masks.of(mask))
        self._given = queries.states
        self._store, self._kernel = store, kernel

    def found(self) -> Found:
        rows = SharedRows(self._queries.states.shape[:3], self._store.shape.value_dim)
        self._attend_to_share(rows)
        out, log_sums = rows.merged(self._store)
        return Found(out.to(self._given.device), log_sums.to(self._given.device))

    def _attend_to_share(self, found: "SharedRows") -> None:
        """Write what the own share gives."""
        (query, group, scale, _), store, mask = self._queries, self._store, self._mask
        local, length = store.local, query.shape[2]
        if not local.num_tokens:
            found.out.zero_()
            found.log_sums.fill_(-torch.inf)
            return
        if length > MAX_QUERIES and has_kernel_for_many(store.shape):
            out, log_sums = self._kernel.attend_many(self._queries, local, self._kernel.seen.of(mask), torch.float32)
            found.out.copy_(out)
            found.log_sums.copy_(log_sums)
            return
        if length > MAX_QUERIES and has_log_sums(store, mask):
            cut = store.share.tokens(store.num_tokens - length)
            out, log_sums = attend_in_pieces(query, local, group, mask, scale, cut)
            found.out.copy_(out)
            found.log_sums.copy_(log_sums)
            return
        for start in range(0, length, MAX_QUERIES):
            few = slice(start, start + MAX_QUERIES)
            seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, few]
            arrays = self._kernel.masks.of(seen) if length <= MAX_QUERIES else mask_arrays(seen)
            workspace = self._kernel.attend(Queries(query[:, :, few], group, scale), local, arrays)
            found.out[:, :, few].copy_(workspace.out.flatten(1, 2))
            found.log_sums[:, :, few].copy_(workspace.log_sums.flatten(1, 2))


class SharedRows:
    """
    What a process finds in its share, in the message that tells the others.

    Args:
        shape: batch, query heads, query length.
        value_dim: width of a value.

    Attributes:
        out: float32 `[*shape, value_dim]`, to be written: attention to the own share.
        log_sums: float32 `shape`, to be written, see `Found`.
    """

    def __init__(self, shape: Sequence[int], value_dim: int):
        self._shape = (*shape, value_dim)
        self._width = value_dim + 1
        self._count = torch.Size(shape).numel()
        self._message = torch.empty(self._count * self._width + MARK_SIZE)
        rows = self._message[:-MARK_SIZE].view(*shape, self._width)
        self.out, self.log_sums = rows[..., :-1], rows[..., -1]

    def merged(self, store: SharedStore) -> Found:
        """
        Attention to all tokens. All processes call this at once, and those of one kind get the same to the last bit.

        Few numbers every process tells every other one, and all merge them: one round. Where that would be many bytes,
        each merges some of the rows, and tells the others what it has merged: two rounds.

        Args:
            store: whose share was attended to.

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

    def _merged(self, store: SharedStore, heard: torch.Tensor) -> torch.Tensor:
        """Rows `[rows, value_dim + 1]` of what processes have told, `[size, rows and mark]`."""
        store.require_same(heard[:, -MARK_SIZE:].tolist())
        rows = heard[:, :-MARK_SIZE].unflatten(1, (-1, self._width))
        # In the order of ranks.
        out, log_sums = merged_at_once(rows[..., :-1], rows[..., -1])
        return torch.cat([out, log_sums.unsqueeze(-1)], dim=-1)

    def _seen(self, rows: torch.Tensor) -> Found:
        """Such rows, all of them, as what attention gives."""
        rows = rows.view(*self._shape[:-1], self._width)
        return Found(rows[..., :-1], rows[..., -1])
