"""Attention over a layer's blocks in host memory: from torch tensors to the kernel and back, or to torch's own."""

import copy
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from ..codecs import MinMaxCodec, is_foldable
from ..kernels import CodedBlocks, Shape, Workspace, compile_and_wait, compile_in_background
from ..storage import (
    GRANULE,
    CacheStats,
    CodedStore,
    HostStore,
    KVCodec,
    KVStore,
    Share,
    SharedStore,
    can_page_lock,
    kernel_element,
    wait_for_computation,
)
from .chunk_attention import attend_in_pieces, attend_to_chunk, has_log_sums
from .layer_selection import LayerSelection
from .shared_attention import SharedRows

# With more queries of a head, attention is bound by arithmetic, and torch's is faster.
MAX_QUERIES = 64
_MAX_WORKSPACES = 8
Arrays = tuple[np.ndarray | None, np.ndarray | None]
Made = TypeVar("Made")


def compile_kernels(dtype: torch.dtype, is_coded: bool, on_wait: Callable[[], None]) -> None:
    """
    Compile attention to keys and values of `dtype`, and to codes, and wait for it.

    Args:
        dtype: nothing is compiled where there is no kernel for it.
        is_coded: of layers that are coded.
        on_wait: called once if it takes more than reading from disk.
    """
    element = kernel_element(dtype)
    if element is not None:
        compile_and_wait(element, is_coded, on_wait)


class CpuAttention:
    """
    Attends on the CPU, for all layers of a cache.

    Queries and results cross between a device and the host through page-locked memory.

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
        # One for each shape that the model's layers have; a few, if the batch or the number of queries changes.
        self._workspaces: OrderedDict[Shape, _TorchWorkspace] = OrderedDict()
        self._mask = _LastMask(_mask_arrays)
        self._own_mask = _LastMask(self._own_part_of)
        self._has_warned = False

    def __deepcopy__(self, memo: dict) -> "CpuAttention":
        twin = CpuAttention(copy.deepcopy(self._stats, memo), self._is_asked_for, self._share)
        twin.is_declined, twin._has_warned = self.is_declined, self._has_warned
        return twin

    def covers(self, codec: KVCodec) -> bool:
        """Whether there is a kernel for blocks that are coded like this."""
        return is_foldable(codec)

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

        Returns:
            `[batch, query_heads, query_length, value_dim]`, of the query's type, on its device.
        """
        if store.wants_queries:
            store.observe(query)
        if isinstance(store, SharedStore):
            if not store.share.is_all:
                return self._attend_together(query, store, group, mask, scale)
            store = store.local
        if query.shape[2] > MAX_QUERIES:
            assert isinstance(store, HostStore | CodedStore)
            store.wait_for_copies()
            return attend_to_chunk(query, store, group, mask, scale)
        workspace = self._run_kernel(query, store, group, self._mask.of(mask), scale, selection)
        if query.is_cpu:
            return workspace.out.to(query.dtype, copy=True).flatten(1, 2)
        is_locked = can_page_lock(query.device.type)
        result = torch.empty(workspace.out.shape, dtype=query.dtype, pin_memory=is_locked)
        result.copy_(workspace.out)
        return result.flatten(1, 2).to(query.device, non_blocking=is_locked)

    def _run_kernel(
        self,
        query: torch.Tensor,
        store: KVStore,
        group: int,
        mask: Arrays,
        scale: float | None,
        selection: LayerSelection | None = None,
    ) -> "_TorchWorkspace":
        """Attend in the kernel; the result is in the workspace."""
        batch, query_heads, query_length, head_dim = query.shape
        num_kv_heads = query_heads // group
        workspace = self._workspace(Shape(batch, num_kv_heads, group, query_length, head_dim, store.shape.value_dim))
        visible, bias = mask
        if query.is_cpu:
            on_host = query
        else:
            on_host = query.to("cpu", non_blocking=can_page_lock(query.device.type))
            wait_for_computation(query.device)
        store.wait_for_copies()
        workspace.query.copy_(on_host.view(batch, num_kv_heads, group, query_length, head_dim))
        assert isinstance(store, HostStore | CodedStore)
        full, coded = (store.full, _coded_blocks(store)) if isinstance(store, CodedStore) else (store, None)
        assert isinstance(full, HostStore)
        mass, most = (1.0, 1.0) if selection is None else (selection.mass_for(group * query_length), selection.most)
        indexed = selection.index.of(store) if selection is not None and mass < 1 else None
        start = time.perf_counter()
        workspace.kernel.attend(
            full.keys.array(),
            full.values.array(),
            store.num_tokens,
            head_dim**-0.5 if scale is None else scale,
            visible=visible,
            bias=bias,
            coded=coded,
            indexed=indexed,
            mass=mass,
            most=most,
        )
        self._stats.kernel_seconds += time.perf_counter() - start
        if selection is not None:
            tokens, left_out = store.num_tokens * workspace.kernel.shape.heads, 0
            if indexed is not None:
                left_out = indexed.num_blocks * GRANULE * workspace.kernel.shape.heads - workspace.kernel.tokens_read
            selection.note(tokens - left_out, tokens, has_rated=indexed is not None)
        return workspace

    def _attend_together(
        self, query: torch.Tensor, store: SharedStore, group: int, mask: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        """Attend to the own share, and merge what all processes have found; all of them do this at once."""
        found = SharedRows(query.shape[:3], store.shape.value_dim)
        self._attend_to_share(query.cpu(), store, group, self._own_mask.of(mask), scale, found)
        return found.merged(store).to(query.device, query.dtype)

    def _attend_to_share(
        self,
        query: torch.Tensor,
        store: SharedStore,
        group: int,
        mask: torch.Tensor | None,
        scale: float | None,
        found: SharedRows,
    ) -> None:
        """Write what the own share gives."""
        local, length = store.local, query.shape[2]
        if not local.num_tokens:
            found.out.zero_()
            found.log_sums.fill_(-torch.inf)
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
            arrays = self._mask.of(seen) if length <= MAX_QUERIES else _mask_arrays(seen)
            workspace = self._run_kernel(query[:, :, few], local, group, arrays, scale)
            found.out[:, :, few].copy_(workspace.out.flatten(1, 2))
            found.log_sums[:, :, few].copy_(workspace.log_sums.flatten(1, 2))

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

    def _workspace(self, shape: Shape) -> "_TorchWorkspace":
        if shape not in self._workspaces:
            self._workspaces[shape] = _TorchWorkspace(shape)
            if len(self._workspaces) > _MAX_WORKSPACES:
                self._workspaces.popitem(last=False)
        self._workspaces.move_to_end(shape)
        return self._workspaces[shape]


def _coded_blocks(store: CodedStore) -> CodedBlocks | None:
    records, keys, values = store.records, store.codec.keys, store.codec.values
    assert isinstance(records, HostStore)
    assert isinstance(keys, MinMaxCodec)
    assert isinstance(values, MinMaxCodec)
    if not records.num_tokens:
        return None
    return CodedBlocks(
        records.keys.array(),
        records.values.array(),
        store.sink_tokens // GRANULE,
        records.num_tokens,
        keys.layout(store.shape.key_dim),
        values.layout(store.shape.value_dim),
        None if keys.balance is None else keys.balance.inverse_array,
        None if values.balance is None else values.balance.inverse_array,
    )


class _TorchWorkspace:
    """
    A kernel's workspace, seen by torch.

    Attributes:
        query: `[batch, num_kv_heads, group, query_length, head_dim]`, to be written.
        out: `[batch, num_kv_heads, group, query_length, value_dim]`, to be read.
        log_sums: `[batch, num_kv_heads, group, query_length]`, to be read.
    """

    def __init__(self, shape: Shape):
        self.kernel = Workspace(shape)

        def seen(array: np.ndarray, width: int) -> torch.Tensor:
            rows = torch.from_numpy(array)[:, : shape.rows, :width]
            return rows.unflatten(0, (shape.batch, shape.num_kv_heads)).unflatten(2, (shape.group, shape.query_length))

        with torch.inference_mode(False):
            self.query = seen(self.kernel.query, shape.key_dim)
            self.out = seen(self.kernel.out, shape.value_dim)
            self.log_sums = seen(self.kernel.lse[:, :, None], 1).squeeze(-1)


class _LastMask(Generic[Made]):
    """
    What was made of the last mask: the layers of a model get the same one after each other.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[torch.Tensor | None], Made]):
        self._make = make
        # The mask, what tells it from others, and what was made of it: one attribute, so that all are of one mask.
        self._last: tuple[torch.Tensor | None, object, Made] = (None, None, make(None))

    def of(self, mask: torch.Tensor | None) -> Made:
        """What `make` makes of `mask`."""
        if mask is None:
            return self._make(None)
        # Every layer gets a view of its own; the mask is held, so that its memory is not another's meanwhile.
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device)
        version = None if mask.is_inference() else mask._version
        last_mask, last_key, made = self._last
        if last_mask is None or (key, version) != last_key or version is None:
            made = self._make(mask)
            self._last = mask, (key, version), made
        return made


def _mask_arrays(mask: torch.Tensor | None) -> Arrays:
    """`mask` as the kernel takes it, (visible, bias), of which at least one is `None`."""
    if mask is None:
        return None, None
    host = mask.detach().to("cpu")
    if host.dtype == torch.bool:
        return host.contiguous().view(torch.uint8).numpy(), None
    return None, host.to(torch.float32).contiguous().numpy()
