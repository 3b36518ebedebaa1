"""Blocks in host memory, attended to on the CPU: by the kernel, or by torch where there are many queries."""

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from ..storage import Issued, Store, can_page_lock
from .chunk_attention import attend_in_pieces, attend_to_chunk
from .host_kernel import MAX_QUERIES, HostKernel, TorchWorkspace, has_kernel_for_many
from .layer_selection import LayerSelection
from .masks import causal_tokens
from .merging import PartialAttention
from .segment import AttentionSegment, Queries


class HostSegment(AttentionSegment):
    """
    Tokens of a layer in host memory, which are those of the middle if both ends are elsewhere.

    Queries and results cross between a device and the host through page-locked memory. While an accelerator attends to
    other segments the kernel runs on a thread of its own.

    Args:
        queries: that attend.
        mask: see `AttentionSegment`.
        store: holds the tokens.
        kernel: attends to them.
        selection: lets few queries skip pages; `None` to read all.
        first_of_chunk: token from which on the mask of many queries hides some.
        elsewhere: tokens of the store, from the first to before the last, that are attended to elsewhere, by few
            queries: those after them are in full precision.
        on_end: told, where the kernel runs beside an accelerator, whether all other segments had ended before it did.
    """

    def __init__(
        self,
        queries: Queries,
        mask: torch.Tensor | None,
        store: Store,
        kernel: HostKernel,
        selection: LayerSelection | None = None,
        first_of_chunk: int = 0,
        elsewhere: tuple[int, int] | None = None,
        on_end: Callable[[bool], None] | None = None,
    ):
        super().__init__(queries, mask)
        self._store = store
        self._kernel = kernel
        self._selection = selection
        self._first_of_chunk = first_of_chunk
        self._elsewhere = elsewhere
        self._on_end = on_end
        self._others: Issued | None = None
        self._running: Future[TorchWorkspace] | None = None

    @property
    def _has_many_queries(self) -> bool:
        return self._queries.states.shape[2] > MAX_QUERIES or self._queries.are_causal

    @property
    def _has_kernel(self) -> bool:
        """Whether there is a kernel for many queries, and it is the faster way."""
        return self._queries.states.is_cpu and has_kernel_for_many(self._store.shape)

    def begin(self) -> None:
        query = self._queries.states
        if query.is_cpu or self._has_many_queries:
            return
        self._running = self._kernel.thread.submit(self._prepared())

    def note_issued(self) -> None:
        if self._running is not None and self._on_end is not None:
            self._others = Issued(self._queries.states.device)

    def partial(self) -> PartialAttention:
        """Attend; on the CPU the result lies in memory of the kernel and is valid until its next call."""
        query = self._queries.states
        if self._has_many_queries:
            return self._partial_in_pieces()
        if self._running is None:
            workspace = self._prepared()()
        else:
            try:
                workspace = self._running.result()
            finally:
                self.end()
        if query.is_cpu:
            return PartialAttention(workspace.out.flatten(1, 2), workspace.lse.flatten(1, 2))
        return PartialAttention(self._on_device(workspace.out), self._on_device(workspace.lse))

    def end(self) -> None:
        if self._running is not None:
            wait([self._running])

    def attend(self) -> torch.Tensor:
        query = self._queries.states
        if self._has_many_queries:
            if self._has_kernel:
                return self._partial_by_kernel(query.dtype).out
            self._store.wait_for_copies()
            return attend_to_chunk(query, self._store, self._queries.group, self._mask, self._queries.scale)
        if not query.is_cpu:
            return self._on_device(self._prepared()().out, query.dtype)
        out = query.new_empty(*query.shape[:3], self._store.shape.value_dim)
        mask = self._kernel.masks.of(self._mask)
        self._kernel.attend(self._queries, self._store, mask, self._selection, self._elsewhere, out)
        return out

    def _prepared(self) -> Callable[[], TorchWorkspace]:
        """Return a function that runs the kernel, on any thread, once the queries are there."""
        on_host, wait_for_query = self._query_on_host()
        mask = self._kernel.masks.of(self._mask)

        def run() -> TorchWorkspace:
            wait_for_query()
            workspace = self._kernel.attend(on_host, self._store, mask, self._selection, self._elsewhere)
            if self._on_end is not None and self._running is not None:
                self._on_end(self._others is not None and self._others.is_done)
            return workspace

        return run

    def _query_on_host(self) -> tuple[Queries, Callable[[], None]]:
        """Return the queries in host memory, and a function that waits for their copy."""
        query = self._queries.states
        if query.is_cpu:
            return self._queries, _nothing_to_wait_for
        on_host = query.to("cpu", non_blocking=can_page_lock(query.device.type))
        return self._queries._replace(states=on_host), Issued(query.device).wait

    def _on_device(self, result: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        device = self._queries.states.device
        is_locked = can_page_lock(device.type)
        on_host = torch.empty(result.shape, dtype=dtype, pin_memory=is_locked)
        on_host.copy_(result)
        return on_host.flatten(1, 2).to(device, non_blocking=is_locked)

    def _partial_in_pieces(self) -> PartialAttention:
        query, group, scale, _ = self._queries
        if self._has_kernel:
            return self._partial_by_kernel(torch.float32)
        self._store.wait_for_copies()
        return attend_in_pieces(query, self._store, group, self._mask, scale, self._first_of_chunk)

    def _partial_by_kernel(self, dtype: torch.dtype) -> PartialAttention:
        """Attend with many queries by the kernel; the output has `dtype`."""
        query, store = self._queries.states, self._store
        is_causal = self._queries.are_causal
        seen = causal_tokens(query.shape[2], store.middle_tokens) if is_causal else self._kernel.seen.of(self._mask)
        return self._kernel.attend_many(self._queries, store, seen, dtype)


def _nothing_to_wait_for() -> None:
    pass
