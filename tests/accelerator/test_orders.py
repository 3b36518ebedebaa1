"""Copies beside the computation, in every order that the caches leave open: nothing is read early or overwritten."""

import copy
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DeviceMemoryError, DynamicHybridCache, HybridCache, OffloadedHybridCache, Placement
from hf_hybrid_cache.storage import (
    CacheStats,
    HostBudget,
    InitialCapacity,
    KVShape,
    Staging,
    Streamed,
    streams_for,
)
from hf_hybrid_cache.storage.runs.streams import AcceleratorStreams

import simulated
from accelerator.orders import CONFIG, IS_SIMULATED, NUM_LAYERS, ORDERS, in_order, kept, sent, states

PLACEMENTS = {
    "prefetch": Placement(offload=True),
    "no prefetch": Placement(offload=True, prefetch_layers=0),
    "two ahead": Placement(offload=True, prefetch_layers=2),
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


def fill(
    cache: HybridCache | DynamicCache, steps: tuple[int, ...], on_device: bool = True, first: int = 0
) -> list[torch.Tensor]:
    """Return the tensors that attention gets in all layers and steps; those on the device are compared later."""
    given = []
    for step, num_tokens in enumerate(steps, first):
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


@contextmanager
def room_for(layers: float) -> Iterator[None]:
    """Leave the device memory for so many layers of 500 tokens and their room to grow."""
    num_bytes = int(layers * 2 * states(768, 0, batch=2).nbytes)
    with simulated.memory_limit(simulated.memory_allocated() + num_bytes):
        yield


@needs_simulation
def test_a_layer_that_has_no_room_on_the_device_is_told_and_not_lost():
    """The error says what to use instead. Where room is found after it, the same cache goes on."""
    cache, steps = OffloadedHybridCache(CONFIG, cpu_decode=False), (100,) * 5
    fill(cache, steps[:1])
    said = r"layer \d, which holds \d+ .*prefill_chunk_size=512"
    with room_for(0.5), pytest.raises(torch.OutOfMemoryError, match=said):
        fill(cache, steps[1:], first=1)
    cache.drop_unfinished()
    done = cache.get_seq_length() // 100
    given, expected = fill(cache, steps[done:], first=done), fill(DynamicCache(config=CONFIG), steps, on_device=False)
    torch.accelerator.synchronize()
    assert all(map(torch.equal, given, expected[-len(given) :]))


@needs_simulation
def test_a_cache_on_the_device_says_what_to_use_instead():
    cache = DynamicHybridCache(CONFIG, cpu_decode=False)
    with room_for(0.5), pytest.raises(DeviceMemoryError, match=r"OffloadedHybridCache.*QuantizedHybridCache"):
        fill(cache, (100,) * 5)


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
