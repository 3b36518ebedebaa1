"""Streams that run every copy as late as the stated order allows, so that an order left unsaid shows as wrong data."""

from collections.abc import Callable, Iterable

import torch

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.layers import LayerStores
from hf_hybrid_cache.storage import HostBudget, InitialCapacity, KVShape, Run, Staging, Streamed, Streams


class Job:
    def __init__(self, copy: Callable[[], None], before: list["Job"]):
        self.copy: Callable[[], None] | None = copy
        self.before = before

    def run(self) -> None:
        """Run what comes first, then the copy; nothing the second time."""
        if self.copy is not None:
            copy, self.copy = self.copy, None
            for job in self.before:
                job.run()
            copy()


class LazyStreams(Streams):
    """
    Copies run when something waits for them, and not before.

    Computation runs at once, as it does on the CPU. `SynchronousStreams` is the other extreme, where every copy runs as
    early as it can.
    """

    def __init__(self) -> None:
        self._last: dict[str, Job | None] = {"to_device": None, "to_host": None}

    def __deepcopy__(self, memo: dict) -> "LazyStreams":
        return self

    def _submit(self, timeline: str, copy: Callable[[], None], after: Iterable[Job | None]) -> Job:
        job = Job(copy, [event for event in (self._last[timeline], *after) if event is not None])
        self._last[timeline] = job
        return job

    def copy_to_device(self, copy: Callable[[], None], after: Iterable[Job | None]) -> Job:
        return self._submit("to_device", copy, after)

    def copy_to_host(self, copy: Callable[[], None], after: Iterable[Job | None]) -> Job:
        return self._submit("to_host", copy, after)

    def computed(self) -> None:
        return None

    def compute_after(self, event: Job | None) -> None:
        self.wait(event)

    def wait(self, event: Job | None) -> None:
        if event is not None:
            event.run()


class StreamsOnCpu(LayerStores):
    """Streams layers that are attended to on the CPU, as for a model on an accelerator."""

    def _segment(
        self,
        ordinal: int,
        shape: KVShape,
        on_cpu: bool,
        capacity: InitialCapacity,
        budget: HostBudget,
        packed: bool = False,
    ) -> Run:
        if not on_cpu:
            return super()._segment(ordinal, shape, on_cpu, capacity, budget, packed)
        return Streamed(shape, capacity, budget, self.stagings[shape.device], packed=packed)


def copy_late(cache: HybridCache) -> None:
    """Let `cache`, which is new, stream all its layers on the CPU, with lazy copies."""
    stores = cache._stores
    stores.__class__ = StreamsOnCpu
    staging = Staging(LazyStreams(), stores.placement.prefetch_layers, cache.stats)
    stores.stagings[torch.device("cpu")] = staging
