"""Attention to blocks in host memory, on the CPU: from torch tensors to the kernels and back."""

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ..codecs import folded_codecs
from ..kernels import (
    QuantizedBlocks,
    Shape,
    Strided,
    WorkingMemory,
    Workspace,
    attend_many,
    compile_and_wait,
    use_threads_here,
    uses_prefill_kernel,
)
from ..storage import (
    GRANULE,
    CacheStats,
    HostBlocks,
    Issued,
    KVShape,
    Store,
    can_page_lock,
    kernel_element,
)
from .merging import PartialAttention
from .queries import (
    MadeOfMasks,
    MaskArrays,
    Queries,
    SeenTokens,
    causal_tokens,
    is_array,
    mask_arrays,
    seen_ranges,
)
from .torch_attention import attend_in_pieces, attend_to_prompt

# With more queries of a head attention is bound by arithmetic, and the kernel for many, or torch's, is faster.
MAX_QUERIES = 64
_MAX_WORKSPACES = 8
_Result = TypeVar("_Result")


def compile_kernels(dtype: torch.dtype, is_quantized: bool, on_wait: Callable[[], None]) -> None:
    """Compile attention to states of `dtype`, or to codes of them; `on_wait` is called if they are not on disk."""
    element = kernel_element(dtype)
    if element is not None:
        compile_and_wait(element, is_quantized, on_wait)


def has_kernel_for_many(shape: KVShape) -> bool:
    """Return whether many queries attend to states of this shape by a kernel on the CPU, which is faster than torch."""
    return shape.element is not None and uses_prefill_kernel(shape.element)


class KernelThread:
    """One thread for kernels beside an accelerator, started at its first use; a forked process starts its own."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Have `work` done after what was given before, with as many threads as torch has where this is called."""
        threads = torch.get_num_threads()

        def run() -> _Result:
            if torch.get_num_threads() != threads:
                use_threads_here(threads)
            return work()

        if self._executor is None or self._process != os.getpid():
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_hybrid_cache-kernel")
            self._process = os.getpid()
        return self._executor.submit(run)


class Blocks(NamedTuple):
    """Tokens in host memory as kernels read them, see `Workspace.attend`."""

    keys: np.ndarray
    values: np.ndarray
    num_tokens: int
    value_dim: int
    quantized: QuantizedBlocks | None = None


class HostAttention:
    """
    Attention to tokens in host memory, for all layers of a cache, with the memory that the kernels work in.

    Queries and results cross between a device and the host through page-locked memory.
    """

    def __init__(self, stats: CacheStats):
        self._thread = KernelThread()
        self._stats = stats
        self._masks, self._ranges = MadeOfMasks(mask_arrays), MadeOfMasks(seen_ranges)
        self.reset()

    def reset(self) -> None:
        """Give back the memory that the kernels work in."""
        self._memory = WorkingMemory()
        # One for each shape that the model's layers have; a few, if the batch or the number of queries changes.
        self._workspaces: OrderedDict[Shape, Workspace] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the kernels work in."""
        return self._memory.num_bytes

    def attend(self, queries: Queries, store: Store) -> torch.Tensor:
        """Attend to all tokens of a store, which are in host memory; the output is like the queries."""
        query = queries.states
        are_few = query.shape[2] <= MAX_QUERIES and not queries.are_causal
        if query.is_cpu and (are_few or has_kernel_for_many(store.shape)):
            return self._attend_to_blocks(queries, blocks_of(store))
        if are_few:
            return _on_device(self._on_host(queries, store)().out, query.device, query.dtype)
        store.wait_for_copies()
        return attend_to_prompt(queries, store)

    def partial(
        self, queries: Queries, store: Store, first_of_chunk: int = 0, num_elsewhere: int = 0
    ) -> PartialAttention:
        """
        Attend to a store in host memory on this thread.

        The mask of many queries hides tokens from `first_of_chunk` on. Few leave out `num_elsewhere` tokens, which are
        attended to elsewhere: the last ones, or the last ones that are quantized.
        """
        query = queries.states
        if query.shape[2] <= MAX_QUERIES and not queries.are_causal:
            return self._attend_few(queries, self._arrays_of(queries), blocks_of(store, num_elsewhere))
        if query.is_cpu and has_kernel_for_many(store.shape):
            blocks = blocks_of(store)
            return self._attend_many(queries, self._seen_by(queries, blocks), blocks, torch.float32)
        store.wait_for_copies()
        return attend_in_pieces(queries, store, first_of_chunk)

    def part(
        self,
        queries: Queries,
        store: Store,
        running: list[Future],
        first_of_chunk: int = 0,
        num_elsewhere: int = 0,
        on_end: Callable[[bool], None] | None = None,
    ) -> Callable[[], PartialAttention]:
        """
        Return a function that attends like `partial`, to be called once others have been; it waits for the result.

        Few queries of an accelerator, which attends to other tokens meanwhile, begin at once beside this thread.
        `running` gets what runs, and `on_end` is told whether the accelerator was done when the kernel ended.
        """
        query = queries.states
        if query.is_cpu or query.shape[2] > MAX_QUERIES or queries.are_causal:
            return lambda: self.partial(queries, store, first_of_chunk, num_elsewhere)
        attend = self._on_host(queries, store, num_elsewhere)
        others: list[Issued] = []

        def run() -> PartialAttention:
            result = attend()
            if on_end is not None:
                on_end(any(each.is_done for each in others))
            return result

        def result() -> PartialAttention:
            if on_end is not None:
                others.append(Issued(query.device))
            out, lse = future.result()
            return PartialAttention(_on_device(out, query.device), _on_device(lse, query.device))

        running.append(self._thread.submit(run))  # in one line, so that whatever comes next, it is waited for
        future = running[-1]
        return result

    def attend_to_chunk(self, queries: Queries, store: Store, chunk: HostBlocks) -> torch.Tensor:
        """Attend to a sequence's first tokens as they came, in full precision, while the store quantizes them."""
        return self._attend_to_blocks(queries, Blocks(*chunk.arrays(), chunk.num_entries, store.shape.value_dim))

    def _attend_to_blocks(self, queries: Queries, blocks: Blocks) -> torch.Tensor:
        """Attend with any number of queries on the CPU; the output has their type."""
        query = queries.states
        if query.shape[2] > MAX_QUERIES or queries.are_causal:
            return self._attend_many(queries, self._seen_by(queries, blocks), blocks, query.dtype).out
        return self._attend_in(queries, self._arrays_of(queries), blocks, query.dtype)[0]

    def _on_host(self, queries: Queries, store: Store, num_elsewhere: int = 0) -> Callable[[], PartialAttention]:
        """Start to copy few queries to the host, and return a function that attends with them, on any thread."""
        query = queries.states
        on_host = queries._replace(states=query.to("cpu", non_blocking=can_page_lock(query.device.type)))
        copied, arrays = Issued(query.device), self._arrays_of(queries)

        def run() -> PartialAttention:
            copied.wait()
            return self._attend_few(on_host, arrays, blocks_of(store, num_elsewhere))

        return run

    def _arrays_of(self, queries: Queries) -> MaskArrays:
        mask = queries.mask
        return (None, None) if mask is None else mask_arrays(mask) if is_array(mask) else self._masks.of(mask)

    def _seen_by(self, queries: Queries, blocks: Blocks) -> SeenTokens:
        if queries.are_causal:
            return causal_tokens(queries.states.shape[2], blocks.num_tokens)
        if queries.mask is None:
            return SeenTokens(np.array([[[[0, blocks.num_tokens]]]]))
        ranges, are_too_wide = self._ranges.of(queries.mask)
        return SeenTokens(ranges, *self._arrays_of(queries)) if are_too_wide else SeenTokens(ranges)

    def _attend_few(self, queries: Queries, mask: MaskArrays, blocks: Blocks) -> PartialAttention:
        """Attend with at most `MAX_QUERIES` of a head on the CPU."""
        out, workspace = self._attend_in(queries, mask, blocks, torch.float32)
        return PartialAttention(out, torch.tensor(workspace.lse))

    def _attend_in(
        self, queries: Queries, mask: MaskArrays, blocks: Blocks, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Workspace]:
        """Do the same; the output has `dtype`, float32 or the query's, and the lse is in the workspace."""
        query, group, scale = queries.states, queries.group, queries.scale
        batch, query_heads, length, head_dim = query.shape
        workspace = self._workspace(Shape(batch, query_heads // group, group, length, head_dim, blocks.value_dim))
        visible, bias = mask
        query = _as_read(query)
        out = torch.empty(batch, query_heads, length, blocks.value_dim, dtype=_written(dtype))
        start = time.perf_counter()
        workspace.attend(
            _strided(query),
            _strided(out),
            blocks.keys,
            blocks.values,
            blocks.num_tokens,
            head_dim**-0.5 if scale is None else scale,
            visible,
            bias,
            blocks.quantized,
        )
        self._stats.kernel_seconds += time.perf_counter() - start
        return out.to(dtype), workspace

    def _attend_many(self, queries: Queries, seen: SeenTokens, blocks: Blocks, dtype: torch.dtype) -> PartialAttention:
        """Attend with any number of queries on the CPU; the output has `dtype`, float32 or the query's."""
        query, scale = queries.states, queries.scale
        batch, query_heads, length, head_dim = query.shape
        query = _as_read(query)
        # In memory a token follows the other, as transformers wants it next.
        out = torch.empty(batch, length, query_heads, blocks.value_dim, dtype=_written(dtype)).transpose(1, 2)
        lse = torch.empty(batch, query_heads, length)
        start = time.perf_counter()
        attend_many(
            _strided(query),
            _strided(out),
            lse.numpy(),
            blocks.keys,
            blocks.values,
            blocks.num_tokens,
            head_dim,
            blocks.value_dim,
            head_dim**-0.5 if scale is None else scale,
            seen.ranges,
            seen.visible,
            seen.bias,
            blocks.quantized,
            self._memory,
        )
        self._stats.kernel_seconds += time.perf_counter() - start
        return PartialAttention(out.to(dtype), lse)

    def _workspace(self, shape: Shape) -> Workspace:
        if shape not in self._workspaces:
            self._workspaces[shape] = Workspace(shape, self._memory)
            if len(self._workspaces) > _MAX_WORKSPACES:
                self._workspaces.popitem(last=False)
        self._workspaces.move_to_end(shape)
        return self._workspaces[shape]


def blocks_of(store: Store, num_elsewhere: int = 0) -> Blocks:
    """Return the tokens of a store in host memory, once all are there, without some that are attended to elsewhere."""
    store.wait_until_stored()
    dense, packed = store.dense, store.packed
    assert isinstance(dense, HostBlocks)
    num_blocks = 0 if packed is None else packed.num_entries - num_elsewhere // GRANULE
    quantized = None
    if num_blocks:
        assert isinstance(packed, HostBlocks)
        assert store.codec is not None
        keys, values = folded_codecs(store.codec)
        quantized = QuantizedBlocks(
            *packed.arrays(),
            store.sink_tokens // GRANULE,
            num_blocks,
            keys.layout(store.shape.key_dim),
            values.layout(store.shape.value_dim),
            None if keys.channel_scaling is None else keys.channel_scaling.inverse_array,
            None if values.channel_scaling is None else values.channel_scaling.inverse_array,
        )
    num_tokens = store.own_tokens - num_elsewhere
    return Blocks(*dense.arrays(), num_tokens, store.shape.value_dim, quantized)


def _as_read(query: torch.Tensor) -> torch.Tensor:
    """Return a query as the kernels read it: bfloat16 or float32, with contiguous rows."""
    query = query if query.dtype == torch.bfloat16 else query.float()
    return query if query.stride(3) == 1 else query.contiguous()


def _written(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the kernels write an output that is to have `dtype`."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _strided(states: torch.Tensor) -> Strided:
    (sequence, head, token, _), size = states.stride(), states.element_size()
    return Strided(states.data_ptr(), sequence * size, head * size, token * size, states.dtype == torch.bfloat16)


def _on_device(result: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy a kernel's result to the device, as `dtype`."""
    is_locked = can_page_lock(device.type)
    on_host = torch.empty(result.shape, dtype=dtype, pin_memory=is_locked)
    on_host.copy_(result)
    return on_host.to(device, non_blocking=is_locked)
