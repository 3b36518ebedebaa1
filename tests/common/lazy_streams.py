"""
Streams that run every copy as late as the stated order allows, so that an order left unsaid shows as wrong data.

A cache beside a GPU copies on streams of their own, ordered by events. On the CPU nothing is ordered wrongly, because
all runs at once. Here a copy is a `Job`, which runs when something waits for it, after the jobs before it, and not
earlier: who reads without having waited reads what was there before.

    cache = OffloadedHybridCache(config)
    copy_late(cache)  # before its first token; then use it, and compare it with a plain cache
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.layers.layer_stores import STREAMED_OR_ATTENDED, LayerStores, Place
from hf_hybrid_cache.storage import KVShape, Staging, Streams


class Job:
    def __init__(self, copies: tuple[Callable[[], object], ...], before: list["Job"]):
        self.copies, self.before = copies, before
        self.is_done = False

    def run(self) -> None:
        """Run what comes first, then the copies; nothing the second time."""
        if not self.is_done:
            self.is_done = True
            for work in (*(job.run for job in self.before), *self.copies):
                work()
            self.copies = ()


class LazyStreams(Streams):
    """
    Copies run when something waits for them, and not before.

    Computation runs at once, as it does on the CPU. `Streams` is the other extreme, where every copy runs as early as
    it can.
    """

    def __init__(self) -> None:
        self._last: dict[str, Job | None] = {"to_device": None, "to_host": None}

    def __deepcopy__(self, memo: dict) -> "LazyStreams":
        return self

    def _submit(self, timeline: str, copies: tuple[Callable[[], object], ...], after: Iterable[Job | None]) -> Job:
        job = Job(copies, [event for event in (self._last[timeline], *after) if event is not None])
        self._last[timeline] = job
        return job

    def copy_to_device(self, *copies: Callable[[], object], after: Iterable[Job | None]) -> Job:
        return self._submit("to_device", copies, after)

    def copy_to_host(self, *copies: Callable[[], object], after: Iterable[Job | None]) -> Job:
        return self._submit("to_host", copies, after)

    def computed(self) -> None:
        return None

    def compute_after(self, event: Job | None) -> None:
        self.wait(event)

    def wait(self, event: Job | None) -> None:
        if event is not None:
            event.run()


class StreamsOnCpu(LayerStores):
    """Streams layers that are attended to on the CPU, as for a model on an accelerator."""

    def place_of(self, layer_idx: int, shape: KVShape) -> Place:
        place = super().place_of(layer_idx, shape)
        return replace(place, kinds=STREAMED_OR_ATTENDED) if place.on_cpu else place


def copy_late(cache: HybridCache) -> None:
    """Let `cache`, which is new, stream all its layers on the CPU, with lazy copies."""
    stores = cache._stores
    stores.__class__ = StreamsOnCpu
    staging = Staging(LazyStreams(), stores.placement.prefetch_layers, cache.stats)
    stores.stagings[torch.device("cpu")] = staging
