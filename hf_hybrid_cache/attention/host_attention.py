"""Attention to blocks in host memory, on the CPU: from torch tensors to the kernels and back."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import ref

import numpy as np
import torch

from ..codecs import folded_codecs
from ..kernels import (
    QuantizedBlocks,
    Shape,
    StoredBlocks,
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
from .queries import (
    MadeOfMasks,
    MaskArrays,
    Queries,
    SeenTokens,
    causal_tokens,
    in_host_memory,
    is_array,
    mask_arrays,
    seen_ranges,
)
from .torch_attention import PartialAttention, attend_in_pieces

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


def _takes_kernel(queries: Queries, shape: KVShape) -> bool:
    """Return whether many queries attend by the kernel: where it is faster, or torch has no such attention."""
    return has_kernel_for_many(shape) or queries.cap is not None


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


class HostAttention:
    """
    Attention to tokens in host memory, for all layers of a cache, with the memory that the kernels work in.

    Queries and results cross between a device and the host through page-locked memory.

    Attributes:
        running: what runs beside this thread, to be waited for.
    """

    def __init__(self, stats: CacheStats):
        self._thread = KernelThread()
        self.running: list[Future] = []
        self._stats = stats
        self._masks, self._ranges = MadeOfMasks(in_host_memory), MadeOfMasks(seen_ranges)
        self.reset()

    def reset(self) -> None:
        """Give back the memory that the kernels work in."""
        self._memory = WorkingMemory()
        # One for each shape that the model's layers have; a few, if the batch or the number of queries changes.
        self._workspaces: dict[Shape, Workspace] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the kernels work in."""
        return self._memory.num_bytes

    def attend(self, queries: Queries, store: Store) -> torch.Tensor:
        """Attend to all tokens of a store, which are in host memory; the output is like the queries."""
        query = queries.states
        are_few = query.shape[2] <= MAX_QUERIES and not queries.are_causal
        if query.is_cpu and (are_few or _takes_kernel(queries, store.shape)):
            return self._attend_to(queries, blocks_of(store), query.dtype)[0]
        if are_few:
            return _on_device(self._on_host(queries, store)().out, query.device, query.dtype)
        if not query.is_cpu:  # one process of a group that is on an accelerator
            mask = None if queries.mask is None else queries.mask.cpu()
            return self.attend(queries._replace(states=query.cpu(), mask=mask), store).to(query.device)
        return attend_in_pieces(queries, store).out.to(query.dtype)

    def partial(self, queries: Queries, store: Store, num_elsewhere: int = 0) -> PartialAttention:
        """
        Attend to a store in host memory on this thread.

        Few queries leave out `num_elsewhere` tokens, which are attended to elsewhere: the last ones, or the last ones
        that are quantized.
        """
        query = queries.states
        are_few = query.shape[2] <= MAX_QUERIES and not queries.are_causal
        if are_few or (query.is_cpu and _takes_kernel(queries, store.shape)):
            out, lse = self._attend_to(queries, blocks_of(store, num_elsewhere), torch.float32)
            return PartialAttention(out, torch.tensor(lse))
        return attend_in_pieces(queries, store)

    def part(
        self,
        queries: Queries,
        store: Store,
        num_elsewhere: int = 0,
        on_end: Callable[[bool], None] | None = None,
    ) -> Callable[[], PartialAttention]:
        """
        Return a function that attends like `partial`, to be called once others have been; it waits for the result.

        Few queries of an accelerator, which attends to other tokens meanwhile, begin at once beside this thread, and
        are `running`. `on_end` is told whether the accelerator was done when the kernel ended.
        """
        query = queries.states
        if query.is_cpu or query.shape[2] > MAX_QUERIES or queries.are_causal:
            return lambda: self.partial(queries, store, num_elsewhere)
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

        self.running.append(self._thread.submit(run))  # in one line, so that whatever comes next, it is waited for
        future = self.running[-1]
        return result

    def _on_host(self, queries: Queries, store: Store, num_elsewhere: int = 0) -> Callable[[], PartialAttention]:
        """Start to copy few queries to the host, and return a function that attends with them, on any thread."""
        query = queries.states
        on_host = queries._replace(states=query.to("cpu", non_blocking=can_page_lock(query.device.type)))
        copied = Issued(query.device)
        if queries.mask is not None:
            on_host = on_host._replace(mask=self._masks.of(queries.mask))

        def run() -> PartialAttention:
            copied.wait()
            return self.partial(on_host, store, num_elsewhere=num_elsewhere)

        return run

    def _attend_to(self, queries: Queries, blocks: StoredBlocks, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
        """
        Attend on the CPU.

        Returns:
            The output, of `dtype`, float32 or the query's, and the log-sum-exp, which the next call overwrites.
        """
        query, group, scale, hides, are_causal, cap, _ = queries
        batch, heads, length, head_dim = query.shape
        value_dim, of_kernel = blocks.value_dim, dtype if dtype == torch.bfloat16 else torch.float32
        if query.dtype not in (torch.bfloat16, torch.float32):
            query = query.float()
        if query.stride(3) != 1:
            query = query.contiguous()
        # In memory a token follows the other, as transformers wants it next.
        strides = length * heads * value_dim, value_dim, heads * value_dim, 1
        out = torch.empty_strided((batch, heads, length, value_dim), strides, dtype=of_kernel)
        ends, scale = (_strided(query), _strided(out)), head_dim**-0.5 if scale is None else scale
        if length <= MAX_QUERIES and not are_causal:
            mask = (None, None) if hides is None else self._arrays_of(hides)
            shape = Shape(batch, heads // group, group, length, head_dim, value_dim)
            workspace = self._workspaces.pop(shape, None) or Workspace(shape, self._memory)
            self._workspaces[shape] = workspace  # after those that were used before
            if len(self._workspaces) > _MAX_WORKSPACES:
                self._workspaces.pop(next(iter(self._workspaces)))
            lse, start = workspace.lse, time.perf_counter()
            workspace.attend(*ends, blocks, scale, *mask, cap)
        else:
            seen, lse = self._seen_by(queries, blocks.num_tokens), np.empty((batch, heads, length), np.float32)
            start = time.perf_counter()
            attend_many(*ends, lse, blocks, scale, seen.ranges, seen.visible, seen.bias, self._memory, cap)
        self._stats.kernel_seconds += time.perf_counter() - start
        return out.to(dtype), lse

    def _arrays_of(self, mask: torch.Tensor) -> MaskArrays:
        return mask_arrays(mask if is_array(mask) else self._masks.of(mask))

    def _seen_by(self, queries: Queries, num_tokens: int) -> SeenTokens:
        if queries.are_causal:
            return causal_tokens(queries.states.shape[2], num_tokens)
        if queries.mask is None:
            return SeenTokens(np.array([[[[0, num_tokens]]]]))
        ranges, are_too_wide = self._ranges.of(queries.mask)
        return SeenTokens(ranges, *self._arrays_of(queries.mask)) if are_too_wide else SeenTokens(ranges)


def blocks_of(store: Store, num_elsewhere: int = 0) -> StoredBlocks:
    """
    Return the record of a store's tokens in host memory, once all are there.

    It is written again if they are elsewhere or in another form than before; their number is written last.

    Args:
        store: that has them.
        num_elsewhere: tokens to leave out, because they are attended to elsewhere.
    """
    if store.streamed is not None:
        for run in store.runs:
            run.wait_until_stored()
    place, blocks = place_of(store, num_elsewhere), store.blocks
    if blocks is None:
        blocks = store.blocks = StoredBlocks()
    if blocks.place != place:
        dense, packed, shape, quantized = store.dense, store.packed, store.shape, None
        assert isinstance(dense, HostBlocks)
        if isinstance(packed, HostBlocks) and place[2:]:
            assert store.codec is not None
            keys, values = folded_codecs(store.codec)
            quantized = QuantizedBlocks(
                *packed.arrays(),
                store.layout.own_sink_tokens // GRANULE,
                packed.num_entries - num_elsewhere // GRANULE,
                keys.layout(shape.key_dim),
                values.layout(shape.value_dim),
                None if keys.channel_scaling is None else keys.channel_scaling.inverse_array,
                None if values.channel_scaling is None else values.channel_scaling.inverse_array,
            )
        blocks.write(*dense.arrays(), shape.num_kv_heads, shape.value_dim, quantized, place)
    blocks.count(store.own_tokens - num_elsewhere, store.num_hidden)
    return blocks


def place_of(store: Store, num_elsewhere: int = 0) -> tuple[object, ...]:
    """Return what is equal while tokens of a store are where they were, as many of them quantized; see `blocks_of`."""
    dense, packed = store.dense, store.packed
    place = ref(dense.keys.held), ref(dense.values.held)
    if packed is None or not (num_blocks := packed.num_entries - num_elsewhere // GRANULE):
        return place
    # The codec of a store with packed blocks stays.
    return *place, ref(packed.keys.held), ref(packed.values.held), num_blocks


def _strided(states: torch.Tensor) -> Strided:
    (sequence, head, token, _), size = states.stride(), states.element_size()
    return Strided(states.data_ptr(), sequence * size, head * size, token * size, states.dtype == torch.bfloat16)


def _on_device(result: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy a kernel's result to the device, as `dtype`."""
    is_locked = can_page_lock(device.type)
    on_host = torch.empty(result.shape, dtype=dtype, pin_memory=is_locked)
    on_host.copy_(result)
    return on_host.to(device, non_blocking=is_locked)
