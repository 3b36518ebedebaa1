"""Attention to the tokens of a store: each segment attends where it is, and the partial results are merged."""

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from ..codecs import is_foldable
from ..kernels import compile_in_background
from ..storage import (
    AnyStore,
    CacheStats,
    ChunkStore,
    HostBlocks,
    KVCodec,
    KVShape,
    Shard,
    ShardedStore,
    SharedPrefix,
    Store,
)
from .device_segment import DeviceSegment
from .host_kernel import HostKernel, has_kernel_for_many
from .host_segment import HostSegment
from .later_chunks import attend_to_later_chunk, is_later_chunk
from .layer_selection import LayerSelection
from .masks import LastMask
from .merging import MergedAttention
from .prefix_segment import PrefixSegment, folded_mask, folded_queries
from .segment import AttentionSegment, Queries
from .sharded_segment import ShardedSegment


class StoredAttention:
    """
    Attends for all layers of a cache that keeps keys and values, or some of them, in host memory.

    Args:
        stats: counters of the cache.
        is_asked_for: the user asked for attention on the CPU, instead of leaving the choice to the cache.
        shard: the tokens of this process, where several processes keep a shard each.

    Attributes:
        is_declined: something else reads the states, so that they are better kept as tensors.
    """

    def __init__(self, stats: CacheStats, is_asked_for: bool, shard: Shard = Shard.ALL):
        self._stats = stats
        self._shard = shard
        self._is_asked_for = is_asked_for
        self.is_declined = self._has_attended = False
        self._kernel = HostKernel(stats)
        # It has its own workspaces, because its result is merged with that of the other one.
        self._prefix_kernel = HostKernel(stats, self._kernel.thread)
        self._prefix_masks: tuple[tuple[int, int], LastMask[torch.Tensor | None]] | None = None
        self._own_masks = LastMask(self._own_columns_of)
        self._has_warned = False

    def __deepcopy__(self, memo: dict) -> "StoredAttention":
        twin = StoredAttention(copy.deepcopy(self._stats, memo), self._is_asked_for, self._shard)
        twin.is_declined, twin._has_warned = self.is_declined, self._has_warned
        twin._has_attended = self._has_attended
        return twin

    def covers(self, codec: KVCodec) -> bool:
        """Return whether there is a kernel on the CPU for blocks that are quantized like this."""
        return is_foldable(codec)

    def has_kernel_for_many(self, shape: KVShape) -> bool:
        """Return whether many queries attend to states of this shape by a kernel on the CPU."""
        return has_kernel_for_many(shape)

    def takes_prompts(self, store: AnyStore) -> bool:
        """Return whether a sequence's first queries attend to their own tokens in `store`, faster than by torch."""
        return (
            not store.is_continued
            and store.has_one_segment
            and isinstance(store.dense, HostBlocks)
            and store.streamed is None
            and store.layout.shard.is_all
            and store.shape.device.type == "cpu"
            and has_kernel_for_many(store.shape)
        )

    def prepare(self, element: np.dtype, is_quantized: bool, is_selected: bool) -> None:
        """Compile the kernel for blocks of `element`, quantized blocks and selected pages ahead of its first use."""
        compile_in_background(element, is_quantized, is_selected)

    def __call__(
        self,
        query: torch.Tensor,
        store: AnyStore,
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
            selection: lets few queries skip pages; `None` to read all.
            are_causal: each query sees the tokens before it and itself; only for a store that `takes_prompts`.

        Returns:
            `[batch, query_heads, query_length, value_dim]`, of the query's type, on its device.
        """
        self._has_attended = True
        if store.wants_queries:
            store.observe(query)
        store.settle()
        queries = Queries(query, group, scale, are_causal)
        if isinstance(store, ChunkStore) and store.tokens_before:
            if is_later_chunk(store, query.shape[2]):
                return attend_to_later_chunk(queries, mask, store, self._kernel)
            store = store.stored
        if store.is_continued:
            segments = self._segments_of_continuations(store, queries, mask, selection)
        else:
            segments = self._segments_of(store, queries, mask, selection, self._kernel)
        return segments[0].attend() if len(segments) == 1 else _merged(segments, mask is not None).to(query.dtype)

    def _segments_of_continuations(
        self, store: SharedPrefix, queries: Queries, mask: torch.Tensor | None, selection: LayerSelection | None
    ) -> list[AttentionSegment]:
        """Put segments on the device first here, too."""
        shared, own = store.prefix.num_tokens, store.tails.num_tokens
        of_prefix = None if mask is None else mask[..., :shared]
        of_tails = None if mask is None else mask[..., shared:]
        continuations, length = store.continuations, queries.states.shape[2]
        folded = queries._replace(states=folded_queries(queries.states, continuations))
        seen = self._prefix_mask(of_prefix, continuations, length)
        if store.is_staged:
            on_device = DeviceSegment(folded, seen, store.prefix.read)
            of_all = PrefixSegment(queries, on_device, continuations)
            return [of_all, DeviceSegment(queries, of_tails, store.tails.read)]
        segments: list[AttentionSegment] = [
            PrefixSegment(queries, each, continuations)
            for each in self._segments_of(store.prefix, folded, seen, selection, self._prefix_kernel)
        ]
        if not own:
            return segments
        tails = self._segments_of(store.tails, queries, of_tails, None, self._kernel)
        return [*segments[:-1], *tails[:-1], segments[-1], tails[-1]]

    def _prefix_mask(self, mask: torch.Tensor | None, continuations: int, length: int) -> torch.Tensor | None:
        """Return the mask of folded queries, made once for the layers of a step."""
        key = continuations, length
        if self._prefix_masks is None or self._prefix_masks[0] != key:
            self._prefix_masks = key, LastMask(lambda mask: folded_mask(mask, continuations, length))
        return self._prefix_masks[1].of(mask)

    def _segments_of(
        self,
        store: Store,
        queries: Queries,
        mask: torch.Tensor | None,
        selection: LayerSelection | None,
        kernel: HostKernel,
    ) -> list[AttentionSegment]:
        """Put segments on the device first: merging writes to the first partial result."""
        if isinstance(store, ShardedStore) and not store.shard.is_all:
            return [ShardedSegment(queries, mask, store, kernel, self._own_masks)]
        if store.ends is None:
            return [HostSegment(queries, mask, store, kernel, selection)]
        on_host = store.middle_tokens
        first, last = store.first_tokens, store.first_tokens + on_host
        of_ends = of_middle = None
        if mask is not None:
            of_ends = torch.cat([mask[..., :first], mask[..., last:]], dim=-1)
            of_middle = mask[..., first:last]
        segments: list[AttentionSegment] = []
        if store.ends.num_entries:
            segments.append(DeviceSegment(queries, of_ends, store.ends.read))
        if not on_host:
            return segments
        on_end = store.note_ended if store.cpu_fraction is not None and store.cpu_fraction.adapts else None
        if not store.is_staged:
            first_of_chunk = max(0, min(last, store.num_tokens - queries.states.shape[2]) - first)
            middle = HostSegment(queries, of_middle, store, kernel, selection, first_of_chunk, on_end=on_end)
            return [*segments, middle]
        start, end = store.staged_range()
        if start < end:
            of_staged = None if of_middle is None else of_middle[..., start:end]
            segments.append(DeviceSegment(queries, of_staged, store.read_staged))
        if end - start < on_host:
            of_others = None
            if of_middle is not None:
                of_others = torch.cat([of_middle[..., :start], of_middle[..., end:]], dim=-1)
            others = HostSegment(queries, of_others, store, kernel, elsewhere=(start, end), on_end=on_end)
            segments.append(others)
        return segments

    @property
    def has_given_states(self) -> bool:
        """Whether something has read the states themselves."""
        return self.is_declined or self._has_warned

    def decline(self, what: str, num_tokens: int) -> None:
        """
        Note that something needs the states themselves, and warn once of what it was.

        Unless the user asked for attention on the CPU they are tensors from now on. Of a model that has read them from
        the first time on, as latent attention does, nothing is said then.

        Args:
            what: the operation that reads them.
            num_tokens: tokens that are stored.
        """
        if not self._is_asked_for and not self.is_declined:
            self.is_declined = True
            self._stats.note_decision(num_tokens, "cpu_decode", False, f"{what} reads keys and values")
        if self._has_warned or not (self._is_asked_for or self._has_attended):
            return
        self._has_warned = True
        consequence = (
            "at every step all of them are copied, which is right and slow"
            if self._is_asked_for
            else "from now on this cache keeps them as tensors and attends by torch, until reset()"
        )
        warnings.warn(
            f"Attention asks for the keys and values that are kept for attention on the CPU ({what} reads them): "
            f"{consequence}. Load the model with attn_implementation='sdpa' to attend where they are, read "
            "cache.layers[i].keys instead of what update() returned, or pass cpu_decode=False to the cache.",
            stacklevel=2,
        )

    def reset(self) -> None:
        """Forget that something needed the states."""
        self.is_declined = self._has_warned = self._has_attended = False

    def _own_columns_of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the columns of a mask for the tokens of the own shard, in host memory."""
        return None if mask is None else mask.cpu().index_select(-1, self._shard.positions(0, mask.shape[-1]))


def _merged(segments: Sequence[AttentionSegment], is_masked: bool) -> torch.Tensor:
    """Attend to several segments, and merge their partial results."""
    merged = MergedAttention()
    try:
        for segment in segments:
            segment.begin()
        for segment in segments[:-1]:
            merged.add(segment.partial())
        segments[-1].note_issued()
        return merged.out_with(segments[-1].partial(), is_masked)
    finally:
        for segment in segments:
            segment.end()
