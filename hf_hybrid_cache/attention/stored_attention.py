"""Attention to what a store holds: to each part where it is, and what they give merged."""

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from ..codecs import is_foldable
from ..kernels import compile_in_background
from ..storage import (
    CacheStats,
    HostStore,
    KVCodec,
    KVShape,
    KVStore,
    LocalStore,
    Share,
    SharedStore,
    SplitStore,
    StreamedStore,
)
from .device_part import DevicePart
from .host_kernel import HostKernel, has_kernel_for_many
from .host_part import HostPart
from .layer_selection import LayerSelection
from .masks import LastMask
from .merging import MergedAttention
from .part import AttentionPart, Queries
from .shared_part import SharedPart


class StoredAttention:
    """
    Attends for all layers of a cache whose keys and values are in host memory, or some of them.

    Args:
        stats: counted into.
        is_asked_for: whether the user wants it, or gets it where it is of use.
        share: of what is attended to, where several processes keep one each.

    Attributes:
        is_declined: something other than this reads the states, so that they are better kept as tensors.
    """

    def __init__(self, stats: CacheStats, is_asked_for: bool, share: Share = Share.ALL):
        self._stats = stats
        self._share = share
        self._is_asked_for = is_asked_for
        self.is_declined = False
        self._kernel = HostKernel(stats)
        self._own_masks = LastMask(self._own_part_of)
        self._has_warned = False

    def __deepcopy__(self, memo: dict) -> "StoredAttention":
        twin = StoredAttention(copy.deepcopy(self._stats, memo), self._is_asked_for, self._share)
        twin.is_declined, twin._has_warned = self.is_declined, self._has_warned
        return twin

    def covers(self, codec: KVCodec) -> bool:
        """Whether there is a kernel on the CPU for blocks that are coded like this."""
        return is_foldable(codec)

    def has_kernel_for_many(self, shape: KVShape) -> bool:
        """Whether many queries attend to states of this shape by a kernel on the CPU."""
        return has_kernel_for_many(shape)

    def takes_prompts(self, store: KVStore) -> bool:
        """Whether a sequence's first queries attend to themselves in `store`, faster than torch to their states."""
        if isinstance(store, SharedStore) and store.share.is_all:
            store = store.local
        is_on_host = isinstance(store, HostStore) and not isinstance(store, StreamedStore)
        return is_on_host and store.shape.device.type == "cpu" and has_kernel_for_many(store.shape)

    def prepare(self, element: np.dtype, is_coded: bool, is_selected: bool) -> None:
        """Have the kernel for blocks of `element`, coded ones and chosen pages, compiled by the time it is needed."""
        compile_in_background(element, is_coded, is_selected)

    def __call__(
        self,
        query: torch.Tensor,
        store: KVStore,
        group: int,
        mask: torch.Tensor | None,
        scale: float | None,
        selection: LayerSelection | None = None,
        are_causal: bool = False,
    ) -> torch.Tensor:
        """
        Attend to the tokens of `store`.

        Args:
            query: `[batch, query_heads, query_length, head_dim]`, on any device.
            store: its keys and values share batch and head_dim with the query.
            group: query heads that share a KV head.
            mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, query_length,
                tokens]`, where any of the first three may be 1.
            scale: of the scores; `None` for `head_dim ** -0.5`.
            selection: what may be left out, of few queries; `None` for nothing.
            are_causal: each query sees the tokens before it and itself; only of a store that `takes_prompts`.

        Returns:
            `[batch, query_heads, query_length, value_dim]`, of the query's type, on its device.
        """
        if store.wants_queries:
            store.observe(query)
        parts = self._parts_of(store, Queries(query, group, scale, are_causal), mask, selection)
        return parts[0].attend() if len(parts) == 1 else _merged(parts, mask is not None).to(query.dtype)

    def _parts_of(
        self, store: KVStore, queries: Queries, mask: torch.Tensor | None, selection: LayerSelection | None
    ) -> list[AttentionPart]:
        if isinstance(store, SplitStore):
            return self._parts_of_split(store, queries, mask, selection)
        if isinstance(store, SharedStore):
            if not store.share.is_all:
                return [SharedPart(queries, mask, store, self._kernel, self._own_masks)]
            store = store.local
        assert isinstance(store, LocalStore)
        return [HostPart(queries, mask, store, self._kernel, selection)]

    def _parts_of_split(
        self, store: SplitStore, queries: Queries, mask: torch.Tensor | None, selection: LayerSelection | None
    ) -> list[AttentionPart]:
        """Those on the device first: what they give is written to when the others are merged."""
        on_host = store.host.num_tokens
        first, last = store.first_tokens, store.first_tokens + on_host
        of_ends = of_middle = None
        if mask is not None:
            of_ends = torch.cat([mask[..., :first], mask[..., last:]], dim=-1)
            of_middle = mask[..., first:last]
        parts: list[AttentionPart] = []
        if store.device.num_tokens:
            parts.append(DevicePart(queries, of_ends, store.device.read))
        if not on_host:
            return parts
        on_end = store.note_ended if store.cpu_share is not None and store.cpu_share.adapts else None
        if not store.is_staged:
            first_of_chunk = max(0, min(last, store.num_tokens - queries.states.shape[2]) - first)
            middle = HostPart(queries, of_middle, store.host, self._kernel, selection, first_of_chunk, on_end=on_end)
            return [*parts, middle]
        start, end = store.staged_range()
        if start < end:
            of_staged = None if of_middle is None else of_middle[..., start:end]
            parts.append(DevicePart(queries, of_staged, store.read_staged))
        if end - start < on_host:
            of_others = None
            if of_middle is not None:
                of_others = torch.cat([of_middle[..., :start], of_middle[..., end:]], dim=-1)
            others = HostPart(queries, of_others, store.host, self._kernel, elsewhere=(start, end), on_end=on_end)
            parts.append(others)
        return parts

    def decline(self) -> None:
        """Note that something needs the states themselves; say, once, how to be fast if this was asked for."""
        if not self._is_asked_for:
            self.is_declined = True
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Attention asks for the keys and values that are kept for attention on the CPU: at every step all of "
                "them are copied, which is right and slow. Load the model with attn_implementation='sdpa' to attend "
                "where they are, or pass cpu_decode=False to the cache.",
                stacklevel=2,
            )

    def _own_part_of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The columns of a mask that are those of the own share, on the host."""
        return None if mask is None else mask.cpu().index_select(-1, self._share.positions(0, mask.shape[-1]))


def _merged(parts: Sequence[AttentionPart], is_masked: bool) -> torch.Tensor:
    """What attention to all parts gives, of which there are several."""
    merged = MergedAttention()
    try:
        for part in parts:
            part.begin()
        for part in parts[:-1]:
            merged.add(part.found())
        parts[-1].note_issued()
        return merged.out_with(parts[-1].found(), is_masked)
    finally:
        for part in parts:
            part.end()
