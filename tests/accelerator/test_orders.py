"""Copies beside the computation, in every order that the caches leave open: nothing is read early or overwritten."""

import copy
import gc
import os
import threading

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import HybridCache, OffloadedHybridCache, Placement
from hf_hybrid_cache.storage import (
    CacheStats,
    HostBudget,
    InitialCapacity,
    KVShape,
    Staging,
    Streamed,
    streams_for,
)
from hf_hybrid_cache.storage.runs.streamed import Slot
from hf_hybrid_cache.storage.runs.streams import AcceleratorStreams

import simulated
from accelerator.orders import CONFIG, DEVICE, IS_SIMULATED, NUM_LAYERS, ORDERS, in_order, kept, sent, states

PLACEMENTS = {
    "prefetch": Placement(offload=True),
    "no prefetch": Placement(offload=True, prefetch_layers=0),
    "partly resident": Placement(offload=True, prefetch_layers=2, resident_layers=2),
    "pageable": Placement(offload=True, pin_memory=False),
}
all_orders = pytest.mark.parametrize("order", ORDERS)
needs_simulation = pytest.mark.skipif(not IS_SIMULATED, reason="needs the simulated accelerator")


def make_stores(num_layers: int, prefetch_layers: int) -> list[Streamed]:
    shape = KVShape.of(sent(states(1, 0)), sent(states(1, 0)))
    staging = Staging(streams_for(shape.device), prefetch_layers, CacheStats())
    budget = HostBudget(num_layers)
    return [Streamed(shape, InitialCapacity(), budget, staging, pinned=True) for _ in range(num_layers)]


def make_cache(name: str, host_tokens: int = 131_072) -> HybridCache:
    cache = HybridCache(CONFIG, PLACEMENTS[name])
    cache._stores.capacity = InitialCapacity(host_tokens=host_tokens)
    return cache


def fill(cache: HybridCache | DynamicCache, steps: tuple[int, ...], on_device: bool = True) -> list[torch.Tensor]:
    """Return the tensors that attention gets in all layers and steps; those on the device are compared later."""
    given = []
    for step, num_tokens in enumerate(steps):
        for layer in range(NUM_LAYERS):
            new = states(num_tokens, 100 * step + layer, batch=2)
            new = sent(new) if on_device else new
            for part in cache.update(new, -new, layer):
                given.append(kept(part) if on_device else part)
    return given


@pytest.mark.default("pairs")
@all_orders
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_cache_dropped_with_copies_under_way_harms_nobody(placement: str, is_copy: bool, order: str):
    """The cache's host memory is unmapped, and its device memory belongs to other tensors."""
    with in_order(order):
        for _ in range(3):
            cache = make_cache(placement)
            if is_copy:
                fill(cache, (300, 1))
                cache = copy.deepcopy(cache)
            fill(cache, (300, 1))
            del cache
            gc.collect()
            others = [sent(states(300, 1)) for _ in range(4)]
            results = [kept(other) for other in others]
            torch.accelerator.synchronize()
            assert all(torch.equal(result, states(300, 1)) for result in results)


def test_a_copy_of_a_cache_has_streams_of_its_own():
    """PyTorch may store on the stream the state that `with stream` restores, which two threads would mix up."""
    cache = make_cache("prefetch")
    fill(cache, (70,))
    all_streams = [each.layers[0].store.dense.staging.streams for each in (cache, copy.deepcopy(cache))]
    together, left = threading.Barrier(2, timeout=30), []

    def copy_together(streams: AcceleratorStreams) -> None:
        before = torch.accelerator.current_stream()
        streams.copy_to_host(together.wait, after=[])
        left.append(torch.accelerator.current_stream() == before)

    threads = [threading.Thread(target=copy_together, args=[streams]) for streams in all_streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all_streams[0] is not all_streams[1]
    assert left == [True, True]


@all_orders
def test_layer_when_its_slot_was_taken_then_is_fetched_after_its_save(order: str):
    """Asking for an empty layer takes a slot without a copy that would wait for the one that is under way."""
    with in_order(order):
        stores = make_stores(3, prefetch_layers=1)
        for layer in (0, 1):
            new = sent(states(70, layer))
            stores[layer].write(new, -new, on_device=True)
        stores[2].read()
        keys, values = (kept(part) for part in stores[1].read())
        torch.accelerator.synchronize()
    assert torch.equal(keys, states(70, 1))
    assert torch.equal(values, -states(70, 1))


@all_orders
@pytest.mark.parametrize("direction", ["to the device", "to the host"])
def test_a_slot_dropped_with_a_copy_under_way_harms_nobody(direction: str, order: str):
    """The slot's memory is free for computation at once."""
    with in_order(order):
        shape = KVShape.of(sent(states(1, 0)), sent(states(1, 0)))
        streams = AcceleratorStreams(shape.device)
        host = torch.ones(4096, 1, 2, 4).pin_memory()
        slot = Slot(shape, streams)
        slot.ensure(4096, keep=0)
        target = slot.keys.read_range(0, 4096).permute(2, 0, 1, 3)
        if direction == "to the device":
            copy_it = lambda target=target: target.copy_(host, non_blocking=True)  # noqa: E731
            slot.arrived = streams.copy_to_device(copy_it, after=[streams.computed()])
        else:
            target.fill_(2.0)
            copy_it = lambda target=target: host.copy_(target, non_blocking=True)  # noqa: E731
            slot.saved = streams.copy_to_host(copy_it, after=[streams.computed()])
        del slot, target, copy_it
        others = [torch.zeros(1, 2, 4096, 4, device=DEVICE) for _ in range(8)]
        results = [kept(other) for other in others]
        torch.accelerator.synchronize()
        assert not any(result.any() for result in results)
        assert torch.equal(host, torch.full_like(host, 1.0 if direction == "to the device" else 2.0))


@all_orders
@needs_simulation
def test_a_device_without_room_for_resident_layers_streams_them(order: str):
    layer_bytes = 2 * states(768, 0, batch=2).nbytes  # the capacity for 500 tokens
    cache = OffloadedHybridCache(CONFIG, resident_layers=NUM_LAYERS, cpu_decode=False)
    steps = (100,) * 5
    with in_order(order), simulated.memory_limit(simulated.memory_allocated() + 7 * layer_bytes // 2):
        with pytest.warns(UserWarning, match="resident layers are streamed from now on"):
            given = fill(cache, steps)
        torch.accelerator.synchronize()
    assert cache.stats.evictions > 0
    assert all(map(torch.equal, given, fill(DynamicCache(config=CONFIG), steps, on_device=False)))


@needs_simulation
def test_a_forked_child_drops_its_cache_without_asking_the_device():
    with simulated.schedule("all late"):
        cache = make_cache("prefetch")
        fill(cache, (70, 1))
        saved = [layer.store.dense.saved for layer in cache.layers]
        child = os.fork()
        if child == 0:
            del cache
            gc.collect()
            # A wait would have let the copies run.
            os._exit(any(event.query() for event in saved))
        assert os.waitpid(child, 0)[1] == 0
        del cache
        assert all(event.query() for event in saved)
