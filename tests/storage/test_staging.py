"""Slots: which layer gets which, what is fetched ahead, and that nothing in use is overwritten."""

import copy
from collections.abc import Callable

import pytest
import torch

from hf_hybrid_cache.storage import CacheStats, HostBudget, InitialCapacity, KVShape, Pair, Staging, Streamed
from hf_hybrid_cache.storage.runs.streams import Streams

from common.lazy_streams import LazyStreams

at_once_and_late = pytest.mark.parametrize("streams", [Streams, LazyStreams], ids=["copies_at_once", "copies_late"])


def states(layer: int, num_tokens: int) -> torch.Tensor:
    return torch.full((1, 2, num_tokens, 4), float(layer + 1)) + torch.arange(num_tokens)[:, None] / 1000


class Layers:
    """Streamed layers that share the slots of one device, in the order of a model."""

    def __init__(
        self,
        num_layers: int,
        prefetch_layers: int = 1,
        streams: Callable[..., Streams] = Streams,
    ):
        made = LazyStreams() if streams is LazyStreams else Streams(torch.device("cpu"))
        self.staging = Staging(made, prefetch_layers, CacheStats())
        self.stats = self.staging.stats
        shape, budget = KVShape.of(states(0, 1), states(0, 1)), HostBudget(num_layers)
        self.runs = [Streamed(shape, InitialCapacity(), budget, self.staging) for _ in range(num_layers)]

    def step(self, num_tokens: int) -> None:
        for layer, run in enumerate(self.runs):
            use(run, states(layer, num_tokens))


def use(run: Streamed, new: torch.Tensor) -> Pair:
    """Store new tokens for a use on the device, and use all."""
    run.write(new, new, on_device=True)
    return run.read()


@pytest.mark.parametrize("prefetch_layers", [0, 1, 2, 5])
def test_layers_are_fetched_ahead_once_a_step_into_few_slots(prefetch_layers: int):
    layers = Layers(6, prefetch_layers)
    layers.step(10)
    stats, token_bytes = layers.stats, layers.runs[0].bytes_per_token
    assert stats.prefetch_misses == 0
    sent = stats.bytes_to_host
    assert sent == 6 * 64 * token_bytes  # whole blocks of 64 tokens
    layers.step(1)
    assert stats.prefetch_misses == (0 if prefetch_layers else 6)
    assert stats.bytes_to_host - sent == 6 * 64 * token_bytes
    if prefetch_layers == 1:
        # The first layer was still there after the prefill, and is on its way for the step after this one.
        assert stats.bytes_to_device == (5 * 10 + 11) * token_bytes
    counted = stats.prefetch_misses
    for run in layers.runs:
        run.read()
    assert stats.prefetch_misses == counted
    layers.step(3)
    assert len(layers.staging.slots) == prefetch_layers + 1
    for run in layers.runs:
        run.close()
    assert layers.staging.slots == []


@at_once_and_late
@pytest.mark.parametrize("prefetch_layers", [0, 1, 2])
@pytest.mark.parametrize("held_layer", [0, 1, 3])
def test_what_is_held_is_not_overwritten_by_later_layers(
    streams: Callable[..., Streams], prefetch_layers: int, held_layer: int
):
    """Models that share keys and values between layers read them long after the layer that stored them."""
    layers, held = Layers(5, prefetch_layers, streams=streams), None
    layers.step(70)
    for layer, run in enumerate(layers.runs):
        read = use(run, states(layer, 1))
        expected = torch.cat([states(layer, 70), states(layer, 1)], dim=2)
        assert all(torch.equal(part, expected) for part in read)
        if layer == held_layer:
            held = *(part[:, :, 1:] for part in read), expected[:, :, 1:]
            run.read()  # each view that was lent counts, not only the last
        del read
        if held is not None:
            assert torch.equal(held[0], held[2])
            assert torch.equal(held[1], held[2])


def test_slots_grown_for_what_was_held_are_used_again():
    layers = Layers(6)
    layers.step(4)
    for _ in range(20):
        held = use(layers.runs[0], states(0, 1))
        for layer, run in enumerate(layers.runs[1:], start=1):
            use(run, states(layer, 1))
        del held
    assert len(layers.staging.slots) <= 3


@at_once_and_late
def test_slot_when_other_entries_are_needed_then_what_is_held_stays(streams: Callable[..., Streams]):
    (run,) = Layers(1, 0, streams=streams).runs
    run.write(states(0, 200), states(0, 200))
    run.stream_from(1)
    held, _ = run.read(run.streamed_from)
    assert all(torch.equal(part, states(0, 200)) for part in run.read())
    assert torch.equal(held, states(0, 200)[:, :, 64:])


@at_once_and_late
def test_write_without_tokens_brings_the_past_and_those_that_follow(streams: Callable[..., Streams]):
    layers = Layers(3, streams=streams)
    layers.step(70)
    _, second, _ = runs = layers.runs
    assert second.slot is None
    nothing = states(0, 0)
    second.write(nothing, nothing, on_device=True)
    assert [run.slot is not None for run in runs] == [False, True, True]
    assert torch.equal(second.read()[0], states(1, 70))


@at_once_and_late
def test_layers_of_several_shapes_share_slots(streams: Callable[..., Streams]):
    layers = Layers(4, streams=streams)
    for layer in (1, 3):
        layers.runs[layer].select(torch.tensor([0, 0]))
    new = [states(layer, 1).repeat(1 + layer % 2, 1, 1, 1) for layer in range(4)]
    for _ in range(20):
        for each, run in zip(new, layers.runs, strict=True):
            use(run, each)
    assert len(layers.staging.slots) == 2
    for each, run in zip(new, layers.runs, strict=True):
        assert torch.equal(run.read()[0], each.repeat(1, 1, 20, 1))


@at_once_and_late
def test_copy_of_one_layer_has_turns_of_its_own(streams: Callable[..., Streams]):
    layers = Layers(3, streams=streams)
    layers.step(70)
    twin = copy.deepcopy(layers.runs[1])
    assert twin.staging.slots == []
    for part in use(twin, states(7, 1)):
        assert torch.equal(part, torch.cat([states(1, 70), states(7, 1)], dim=2))
    assert twin.staging.slots == [twin.slot]
    assert torch.equal(layers.runs[1].read()[0], states(1, 70))
    assert len(layers.staging.slots) == 2
