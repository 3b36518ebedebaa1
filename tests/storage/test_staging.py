"""Slots: which layer gets which, what is fetched ahead, and that nothing in use is overwritten."""

import copy

import pytest
import torch

from hf_hybrid_cache.storage import CacheStats, HostBudget, InitialCapacity, KVShape, Pair, Staging, Streamed
from hf_hybrid_cache.storage.runs.streams import Streams

from common.lazy_streams import LazyStreams


def at_once() -> Streams:
    return Streams(torch.device("cpu"))


STREAMS = {"copies_at_once": at_once, "copies_late": LazyStreams}


def states(layer: int, num_tokens: int) -> torch.Tensor:
    return torch.full((1, 2, num_tokens, 4), float(layer + 1)) + torch.arange(num_tokens)[:, None] / 1000


def make_stores(num_layers: int, prefetch_layers: int, resident: set[int] = frozenset(), streams=at_once):
    staging = Staging(streams(), prefetch_layers, CacheStats())
    shape = KVShape.of(states(0, 1), states(0, 1))
    budget = HostBudget(num_layers)
    return staging, [Streamed(shape, InitialCapacity(), budget, staging, i in resident) for i in range(num_layers)]


def add(store: Streamed, new: torch.Tensor) -> Pair:
    """Store new tokens for a use on the device, and use all."""
    store.write(new, new, on_device=True)
    return store.read()


def step(stores: list[Streamed], num_tokens: int) -> None:
    for layer, store in enumerate(stores):
        add(store, states(layer, num_tokens))


@pytest.mark.parametrize("prefetch_layers", [0, 1, 2, 5])
def test_the_device_holds_one_layer_and_those_fetched_ahead(prefetch_layers: int):
    staging, stores = make_stores(8, prefetch_layers)
    for _ in range(4):
        step(stores, 3)
    assert len(staging.slots) == prefetch_layers + 1


def test_every_layer_is_fetched_ahead_once_a_step():
    staging, stores = make_stores(6, prefetch_layers=1)
    step(stores, 10)
    stats = staging.stats
    assert (stats.prefetch_hits, stats.prefetch_misses) == (0, 0)
    sent = stats.bytes_to_host
    # Whole blocks of 64 tokens.
    assert sent == 6 * 64 * stores[0].bytes_per_token
    step(stores, 1)
    assert (stats.prefetch_hits, stats.prefetch_misses) == (6, 0)
    assert stats.bytes_to_host - sent == 6 * 64 * stores[0].bytes_per_token
    # The first layer was still there after the prefill, and is on its way for the step after this one.
    assert stats.bytes_to_device == (5 * 10 + 11) * stores[0].bytes_per_token


def test_without_prefetch_every_layer_misses():
    staging, stores = make_stores(3, prefetch_layers=0)
    step(stores, 10)
    step(stores, 1)
    assert (staging.stats.prefetch_hits, staging.stats.prefetch_misses) == (0, 3)


def test_resident_layers_are_never_fetched():
    staging, stores = make_stores(4, prefetch_layers=1, resident={0, 1, 2, 3})
    for _ in range(3):
        step(stores, 5)
    assert staging.stats.bytes_to_device == 0
    assert staging.stats.evictions == 0
    assert len(staging.slots) == 4


def test_a_resident_layer_keeps_its_slot_when_its_sequences_are_reordered():
    staging, stores = make_stores(2, prefetch_layers=1, resident={0})
    step(stores, 5)
    for _ in range(3):
        for store in stores:
            store.select(torch.tensor([0, 0]))
            store.select(torch.tensor([1]))
        step(stores, 1)
    assert len(staging.slots) <= 3


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("prefetch_layers", [0, 1, 2])
@pytest.mark.parametrize("held_layer", [0, 1, 3])
def test_what_is_held_is_not_overwritten_by_later_layers(streams, prefetch_layers: int, held_layer: int):
    """Models that share keys and values between layers read them long after the layer that stored them."""
    _, stores = make_stores(5, prefetch_layers, streams=streams)
    step(stores, 70)
    held = None
    for layer, store in enumerate(stores):
        keys, values = add(store, states(layer, 1))
        expected = torch.cat([states(layer, 70), states(layer, 1)], dim=2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected)
        if layer == held_layer:
            held = keys, values, expected
        del keys, values
        if held is not None:
            assert torch.equal(held[0], held[2])
            assert torch.equal(held[1], held[2])


def test_every_view_that_was_lent_counts_as_held_not_only_the_last():
    _, stores = make_stores(4, prefetch_layers=1)
    step(stores, 5)
    held = stores[0].read()[0]
    stores[0].read()
    step(stores[1:], 1)
    assert torch.equal(held, states(0, 5))


def test_prefetch_stats_when_layer_is_only_read_then_count_nothing():
    staging, stores = make_stores(4, prefetch_layers=1)
    step(stores, 5)
    for store in stores:
        store.read()
    assert (staging.stats.prefetch_hits, staging.stats.prefetch_misses) == (0, 0)


def test_slots_grown_for_what_was_held_are_used_again():
    staging, stores = make_stores(6, prefetch_layers=1)
    step(stores, 4)
    for _ in range(20):
        held = add(stores[0], states(0, 1))
        for layer, store in enumerate(stores[1:], start=1):
            add(store, states(layer, 1))
        del held
    assert len(staging.slots) <= 3


def test_released_stores_leave_nothing_on_the_device():
    staging, stores = make_stores(4, prefetch_layers=2, resident={1})
    step(stores, 4)
    for store in stores:
        store.close()
    assert staging.slots == []


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_slot_when_tokens_were_cropped_on_host_then_is_not_stale(streams):
    _, stores = make_stores(1, prefetch_layers=0, streams=streams)
    stores[0].write(states(0, 5), states(0, 5))
    stores[0].read()
    stores[0].truncate(3)
    stores[0].write(states(7, 2), states(7, 2))
    for part in stores[0].read():
        assert torch.equal(part, torch.cat([states(0, 3), states(7, 2)], dim=2))


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_slot_when_other_entries_are_needed_then_what_is_held_stays(streams):
    _, stores = make_stores(1, prefetch_layers=0, streams=streams)
    stores[0].write(states(0, 200), states(0, 200))
    stores[0].stream_from(1)
    held, _ = stores[0].read_staged()
    for part in stores[0].read():
        assert torch.equal(part, states(0, 200))
    assert torch.equal(held, states(0, 200)[:, :, 64:])


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_write_without_tokens_brings_the_past_and_those_that_follow(streams):
    _, stores = make_stores(3, prefetch_layers=1, streams=streams)
    step(stores, 70)
    assert stores[1].slot is None
    nothing = states(0, 1)[:, :, :0]
    stores[1].write(nothing, nothing, on_device=True)
    assert [store.slot is not None for store in stores] == [False, True, True]
    assert torch.equal(stores[1].read()[0], states(1, 70))


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_layers_of_several_shapes_share_slots(streams):
    staging, stores = make_stores(4, prefetch_layers=1, streams=streams)
    wide = [states(layer, 1).repeat(2, 1, 1, 1) for layer in range(4)]
    for layer in (1, 3):
        stores[layer].select(torch.tensor([0, 0]))
    for _ in range(70):
        for layer, store in enumerate(stores):
            add(store, wide[layer] if layer % 2 else wide[layer][:1])
    assert len(staging.slots) == 2
    for layer, store in enumerate(stores):
        batch = 2 if layer % 2 else 1
        assert torch.equal(store.read()[0], wide[layer][:batch].repeat(1, 1, 70, 1))


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_copy_of_one_layer_has_turns_of_its_own(streams):
    staging, stores = make_stores(3, prefetch_layers=1, streams=streams)
    step(stores, 70)
    twin = copy.deepcopy(stores[1])
    assert twin.staging.slots == []
    for part in add(twin, states(7, 1)):
        assert torch.equal(part, torch.cat([states(1, 70), states(7, 1)], dim=2))
    assert twin.staging.slots == [twin.slot]
    assert torch.equal(stores[1].read()[0], states(1, 70))
    assert len(staging.slots) == 2
