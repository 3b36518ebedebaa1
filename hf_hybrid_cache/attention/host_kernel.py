"""Attention over a layer's blocks in host memory: from torch tensors to the kernel and back."""

import copy
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from ..codecs import folded_codecs
from ..kernels import (
    QuantizedBlocks,
    Query,
    Shape,
    Strided,
    Workspace,
    attend_many,
    compile_and_wait,
    uses_prefill_kernel,
)
from ..storage import GRANULE, CacheStats, HostBlocks, KVShape, Store, kernel_element
from .kernel_thread import KernelThread
from .layer_selection import LayerSelection
from .masks import Arrays, LastMask, SeenTokens, mask_arrays, seen_tokens
from .merging import PartialAttention
from .segment import Queries

# With more queries of a head attention is bound by arithmetic, and the kernel for many, or torch's, is faster.
MAX_QUERIES = 64
_MAX_WORKSPACES = 8


def compile_kernels(dtype: torch.dtype, is_quantized: bool, on_wait: Callable[[], None]) -> None:
    """
    Compile attention to keys and values of `dtype`, and to codes, and wait for it.

    Args:
        dtype: nothing is compiled where there is no kernel for it.
        is_quantized: of layers that are quantized.
        on_wait: called once if it takes more than reading from disk.
    """
    element = kernel_element(dtype)
    if element is not None:
        compile_and_wait(element, is_quantized, on_wait)


def has_kernel_for_many(shape: KVShape) -> bool:
    """Return whether many queries attend to states of this shape by a kernel on the CPU, which is faster than torch."""
    return shape.element is not None and uses_prefill_kernel(shape.element)


class HostKernel:
    """
    The kernel, for all layers of a cache, with the memory that it works in.

    Args:
        stats: counters of the cache.
        thread: thread to share with another kernel.

    Attributes:
        thread: thread for kernels that run beside the caller.
        masks: masks as the kernel for few queries takes them.
        seen: masks as the kernel for many queries takes them.
    """

    def __init__(self, stats: CacheStats, thread: KernelThread | None = None):
        self._stats = stats
        self.thread = thread or KernelThread()
        self.masks = LastMask[Arrays](mask_arrays)
        self.seen = LastMask[SeenTokens](seen_tokens)
        # One for each shape that the model's layers have; a few, if the batch or the number of queries changes.
        self._workspaces: OrderedDict[Shape, TorchWorkspace] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> "HostKernel":
        return HostKernel(copy.deepcopy(self._stats, memo))

    def attend(
        self,
        queries: Queries,
        store: Store,
        mask: Arrays,
        selection: LayerSelection | None = None,
        elsewhere: tuple[int, int] | None = None,
        out: torch.Tensor | None = None,
    ) -> "TorchWorkspace":
        """
        Attend to the tokens of `store`, which are in host memory; the result is in the workspace until the next call.

        Args:
            queries: on the CPU, at most `MAX_QUERIES` of a head.
            store: its keys and values share batch and head_dim with the query.
            mask: of its tokens.
            selection: lets few queries skip pages; `None` to read all.
            elsewhere: tokens, from the first to before the last, that are attended to elsewhere: the last ones, or the
                last ones that are quantized.
            out: `[batch, query_heads, query_length, value_dim]`, of the query's type, written with the result too.
        """
        query, group, scale, _ = queries
        batch, query_heads, query_length, head_dim = query.shape
        workspace = self._workspace(
            Shape(batch, query_heads // group, group, query_length, head_dim, store.shape.value_dim)
        )
        visible, bias = mask
        store.wait_until_stored()
        query = _as_read(query)
        sequence_stride, head_stride, query_stride, _ = query.stride()
        written = out.data_ptr() if out is not None and out.dtype == query.dtype else 0
        num_elsewhere = 0 if elsewhere is None else elsewhere[1] - elsewhere[0]
        keys, values, quantized = _arrays_of(store, 0 if store.packed is None else num_elsewhere // GRANULE)
        num_tokens = store.middle_tokens - num_elsewhere
        top_p, most = (1.0, 1.0) if selection is None else (selection.top_p_for(group * query_length), selection.most)
        indexed = selection.index.of(store) if selection is not None and top_p < 1 else None
        start = time.perf_counter()
        workspace.kernel.attend(
            Query(query.data_ptr(), (sequence_stride, head_stride, query_stride), query.dtype == torch.bfloat16),
            keys,
            values,
            num_tokens,
            head_dim**-0.5 if scale is None else scale,
            visible=visible,
            bias=bias,
            quantized=quantized,
            indexed=indexed,
            top_p=top_p,
            most=most,
            written=written,
        )
        if out is not None and not written:
            out.copy_(workspace.out.flatten(1, 2))
        self._stats.kernel_seconds += time.perf_counter() - start
        if selection is not None:
            tokens, skipped = num_tokens * workspace.kernel.shape.heads, 0
            if indexed is not None:
                skipped = indexed.num_blocks * GRANULE * workspace.kernel.shape.heads - workspace.kernel.tokens_read
            selection.note(tokens - skipped, tokens, has_rated=indexed is not None)
        return workspace

    def attend_many(self, queries: Queries, store: Store, seen: SeenTokens, dtype: torch.dtype) -> PartialAttention:
        """
        Attend to the tokens of `store`, which are in host memory, with any number of queries.

        Args:
            queries: on the CPU.
            store: its keys and values share batch, type and head_dim with the query.
            seen: of its tokens.
            dtype: type of the result, float32 or the query's.
        """
        query, _, scale, _ = queries
        batch, query_heads, query_length, head_dim = query.shape
        store.wait_until_stored()
        keys, values, quantized = _arrays_of(store)
        query = _as_read(query)
        partial = dtype if dtype == torch.bfloat16 else torch.float32
        # In memory a token follows the other, as transformers wants it next.
        out = torch.empty(batch, query_length, query_heads, store.shape.value_dim, dtype=partial).transpose(1, 2)
        lse = torch.empty(batch, query_heads, query_length)
        tokens = store.middle_tokens
        everything = np.array([[[[0, tokens]]]]) if seen.ranges is None else seen.ranges
        start = time.perf_counter()
        attend_many(
            _strided(query),
            _strided(out),
            partial == torch.bfloat16,
            lse.numpy(),
            keys,
            values,
            tokens,
            head_dim,
            store.shape.value_dim,
            head_dim**-0.5 if scale is None else scale,
            everything,
            seen.visible,
            seen.bias,
            quantized,
        )
        self._stats.kernel_seconds += time.perf_counter() - start
        return PartialAttention(out.to(dtype), lse)

    def _workspace(self, shape: Shape) -> "TorchWorkspace":
        if shape not in self._workspaces:
            self._workspaces[shape] = TorchWorkspace(shape)
            if len(self._workspaces) > _MAX_WORKSPACES:
                self._workspaces.popitem(last=False)
        self._workspaces.move_to_end(shape)
        return self._workspaces[shape]


class TorchWorkspace:
    """
    A kernel's workspace, seen by torch.

    Attributes:
        out: `[batch, num_kv_heads, group, query_length, value_dim]`.
        lse: `[batch, num_kv_heads, group, query_length]`.
    """

    def __init__(self, shape: Shape):
        self.kernel = Workspace(shape)

        def seen(array: np.ndarray, width: int) -> torch.Tensor:
            rows = torch.from_numpy(array)[:, : shape.rows, :width]
            return rows.unflatten(0, (shape.batch, shape.num_kv_heads)).unflatten(2, (shape.group, shape.query_length))

        with torch.inference_mode(False):
            self.out = seen(self.kernel.out, shape.value_dim)
            self.lse = seen(self.kernel.lse[:, :, None], 1).squeeze(-1)


def _as_read(query: torch.Tensor) -> torch.Tensor:
    """Return a query as the kernels read it: bfloat16 or float32, with contiguous rows."""
    query = query if query.dtype == torch.bfloat16 else query.float()
    return query if query.stride(3) == 1 else query.contiguous()


def _strided(states: torch.Tensor) -> Strided:
    sequence, head, token, _ = (stride * states.element_size() for stride in states.stride())
    return Strided(states.data_ptr(), (sequence, head, token))


def _arrays_of(store: Store, num_left_out: int = 0) -> tuple[np.ndarray, np.ndarray, QuantizedBlocks | None]:
    """Return blocks of keys and values in full precision, and the quantized ones, if any, without the last ones."""
    full = store.dense
    assert isinstance(full, HostBlocks)
    arrays = full.keys.array(), full.values.array()
    packed = store.packed
    if packed is None or packed.num_entries == num_left_out:
        return *arrays, None
    assert isinstance(packed, HostBlocks)
    assert store.codec is not None
    keys, values = folded_codecs(store.codec)
    return *arrays, QuantizedBlocks(
        packed.keys.array(),
        packed.values.array(),
        store.sink_tokens // GRANULE,
        packed.num_entries - num_left_out,
        keys.layout(store.shape.key_dim),
        values.layout(store.shape.value_dim),
        None if keys.channel_scaling is None else keys.channel_scaling.inverse_array,
        None if values.channel_scaling is None else values.channel_scaling.inverse_array,
    )
