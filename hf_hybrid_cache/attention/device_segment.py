"""Tokens whose keys and values are tensors on the device that attends: resident there, or streamed to it."""

from collections.abc import Callable

import torch

from ..storage import Pair
from .merging import PartialAttention
from .segment import AttentionSegment, Queries, rows_of_mask
from .torch_attention import attend_by_torch


class DeviceSegment(AttentionSegment):
    """
    Tokens on the device of the query.

    Query heads that share a KV head are seen as more queries of one head, so that what is stored is read once.

    Args:
        queries: that attend.
        mask: see `AttentionSegment`.
        read: gives keys and values, `[batch, num_kv_heads, tokens, head_dim]`, at least one token; asked when all other
            segments have begun, because computation may wait for the bus from then on.
    """

    def __init__(self, queries: Queries, mask: torch.Tensor | None, read: Callable[[], Pair]):
        super().__init__(queries, mask)
        self._read = read

    def partial(self) -> PartialAttention:
        query = self._queries.states
        batch, heads, length, key_dim = query.shape
        keys, values = self._read()
        rows = query.reshape(batch, keys.shape[1], self._queries.group * length, key_dim)
        mask = None if self._mask is None else rows_of_mask(self._mask, query.shape, self._queries.group)
        out, lse = attend_by_torch(rows, keys, values, mask, self._queries.scale)
        return PartialAttention(out.reshape(batch, heads, length, -1), lse.reshape(batch, heads, length))
