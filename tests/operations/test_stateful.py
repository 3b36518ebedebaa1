"""Random sequences of everything a cache can be asked, beside `DynamicCache`: the same states, to the last bit."""

import copy
from functools import partial
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import HybridCache, KVCodec, OffloadedHybridCache, Placement, minmax
from hf_hybrid_cache.storage import CpuFraction, InitialCapacity

from common.caches import CACHES, QUANTIZED
from common.lazy_streams import copy_late
from common.quantized_reference import quantized_reference
from common.soak import count, search_at_random

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4
CONFIG = LlamaConfig(
    num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=NUM_KV_HEADS, hidden_size=16, vocab_size=8
)


def with_lazy_streams(
    prefetch_layers: int,
    resident_layers: int,
    host_tokens: int = 131_072,
    cpu_decode: bool | float | tuple[int, ...] = False,
    codec: KVCodec | None = None,
    device_tokens: int = 0,
) -> HybridCache:
    placement = Placement(True, prefetch_layers, resident_layers, cpu_decode=cpu_decode, device_tokens=device_tokens)
    cache = HybridCache(CONFIG, placement, codec=codec)
    cache._stores.capacity = InitialCapacity(host_tokens=host_tokens)
    copy_late(cache)
    return cache


class RestlessFraction(CpuFraction):
    """Another share at each use."""

    def blocks(self, num_blocks: int) -> int:
        self.fraction = (self.fraction + 0.3) % 1
        return super().blocks(num_blocks)


def with_restless_fraction(cache: HybridCache) -> HybridCache:
    cache._stores.cpu_fraction = RestlessFraction(0.5, False, cache.stats)
    return cache


VARIANTS = {name: lambda make=make: make(CONFIG) for name, make in CACHES.items()} | {
    "no_prefetch": lambda: OffloadedHybridCache(CONFIG, prefetch_layers=0),
    "all_prefetch": lambda: OffloadedHybridCache(CONFIG, prefetch_layers=9),
    "all_resident": lambda: HybridCache(CONFIG, Placement(offload=True, resident_layers=NUM_LAYERS)),
    "lazy_copies": lambda: with_lazy_streams(1, 0),
    "lazy_copies_no_prefetch": lambda: with_lazy_streams(0, 1),
    "lazy_copies_partly": lambda: with_lazy_streams(2, 1),
    "lazy_copies_growing": lambda: with_lazy_streams(1, 2, host_tokens=70),
    "lazy_copies_cpu_decode": lambda: with_lazy_streams(1, 0, cpu_decode=True),
    "split_of_more": lambda: HybridCache(CONFIG, Placement(cpu_decode=True, device_tokens=321)),
    "lazy_copies_split": lambda: with_lazy_streams(1, 0, cpu_decode=True, device_tokens=192),
    "lazy_copies_split_streamed": lambda: with_lazy_streams(1, 1, host_tokens=70, device_tokens=150),
    "lazy_copies_split_in_three": lambda: with_restless_fraction(
        with_lazy_streams(1, 0, host_tokens=70, cpu_decode=0.5, device_tokens=192)
    ),
    "lazy_copies_split_partly": lambda: with_lazy_streams(0, 0, cpu_decode=(1, 3), device_tokens=128),
    "lazy_copies_cpu_decode_partly": lambda: with_lazy_streams(1, 0, host_tokens=70, cpu_decode=(1, 3)),
}
QUANTIZED_VARIANTS = {name: tuple(partial(make, CONFIG) for make in pair) for name, pair in QUANTIZED.items()} | {
    "lazy_copies_of_codes": (
        lambda: with_lazy_streams(1, 1, codec=minmax(4, sink_tokens=0, rotate=True)),
        lambda: quantized_reference(CONFIG, minmax(4, sink_tokens=0, rotate=True)),
    ),
    "lazy_copies_of_codes_growing": (
        lambda: with_lazy_streams(0, 0, host_tokens=70, codec=minmax(8, rotate=True)),
        lambda: quantized_reference(CONFIG, minmax(8, rotate=True)),
    ),
    "lazy_copies_of_codes_split": (
        lambda: with_lazy_streams(1, 0, cpu_decode=True, codec=minmax(4, rotate=True), device_tokens=192),
        lambda: quantized_reference(CONFIG, minmax(4, rotate=True), device_tokens=192),
    ),
    "lazy_copies_of_codes_split_streamed": (
        lambda: with_lazy_streams(0, 0, host_tokens=70, codec=minmax(8, sink_tokens=0, rotate=True), device_tokens=130),
        lambda: quantized_reference(CONFIG, minmax(8, sink_tokens=0, rotate=True), device_tokens=130),
    ),
    "lazy_copies_of_codes_split_in_three": (
        lambda: with_restless_fraction(
            with_lazy_streams(1, 0, cpu_decode=0.5, codec=minmax(8, sink_tokens=0, rotate=True), device_tokens=130)
        ),
        lambda: quantized_reference(CONFIG, minmax(8, sink_tokens=0, rotate=True), device_tokens=130),
    ),
    "lazy_copies_of_codes_cpu_decode": (
        lambda: with_lazy_streams(1, 0, host_tokens=70, cpu_decode=True, codec=minmax(4, rotate=True)),
        lambda: quantized_reference(CONFIG, minmax(4, rotate=True)),
    ),
}


class CacheMachine(RuleBasedStateMachine):
    variant: str
    tolerance: ClassVar = {"rtol": 1.3e-6, "atol": 1e-5}

    def make(self) -> tuple[HybridCache, DynamicCache]:
        return VARIANTS[self.variant](), DynamicCache(config=CONFIG)

    @initialize(batch=st.integers(1, 3))
    def start(self, batch: int) -> None:
        self.batch = batch
        self.generator = torch.Generator().manual_seed(0)
        self.ours, self.stock = self.make()

    @property
    def num_tokens(self) -> int:
        return self.stock.get_seq_length()

    @rule(new_tokens=st.sampled_from([1, 1, 2, 63, 64, 65, 255, 257]), layers=st.just(NUM_LAYERS))
    def update(self, new_tokens: int, layers: int) -> None:
        # A model's order: attention reads what `update` returned before the next layer's `update`.
        for layer in range(layers):
            shape = (self.batch, NUM_KV_HEADS, new_tokens, HEAD_DIM)
            keys, values = (torch.randn(shape, generator=self.generator) for _ in range(2))
            ours, theirs = (cache.update(keys, values, layer) for cache in (self.ours, self.stock))
            query = torch.randn((self.batch, 2 * NUM_KV_HEADS, new_tokens, HEAD_DIM), generator=self.generator)
            attended = [scaled_dot_product_attention(query, *states, enable_gqa=True) for states in (ours, theirs)]
            torch.testing.assert_close(*attended, **self.tolerance)
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
            del ours

    @rule(tokens=st.integers(0, 400))
    def crop(self, tokens: int) -> None:
        self.ours.crop(-tokens)
        # transformers 5.17 cannot crop what was never filled.
        if self.num_tokens > 0:
            self.stock.crop(-tokens)

    @precondition(lambda self: self.num_tokens > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        sequences = st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch)
        indices = torch.tensor(data.draw(sequences))
        for cache in (self.ours, self.stock):
            cache.reorder_cache(indices)

    @precondition(lambda self: self.num_tokens > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        indices = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3)))
        for cache in (self.ours, self.stock):
            cache.batch_select_indices(indices)
        self.batch = len(indices)

    @precondition(lambda self: self.num_tokens > 0 and self.batch <= 3)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        for cache in (self.ours, self.stock):
            cache.batch_repeat_interleave(repeats)
        self.batch *= repeats

    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.ours.reset()
        # Not `reset`: transformers 5.17 only zeroes what is stored.
        _, self.stock = self.make()
        self.batch = batch

    @rule()
    def copy(self) -> None:
        self.ours = copy.deepcopy(self.ours)

    @rule(layer=st.integers(0, NUM_LAYERS - 1))
    def look(self, layer: int) -> None:
        if self.num_tokens > 0:
            assert torch.equal(self.ours.layers[layer].keys, self.stock.layers[layer].keys)

    @invariant()
    def holds_the_same_after_each_step(self) -> None:
        # Copies that are run late stay late: looking at what is stored would run them.
        if hasattr(self, "ours") and not self.variant.startswith("lazy"):
            self.holds_the_same()

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.holds_the_same()
            count("examples of operation sequences")

    def holds_the_same(self) -> None:
        assert self.ours.get_seq_length() == self.num_tokens
        assert self.ours.get_mask_sizes(3, 0) == self.stock.get_mask_sizes(3, 0)
        if self.num_tokens == 0:
            return
        # A copy is looked at, so that looking does not fetch what the next step should find fetched, or not.
        for ours, theirs in zip(copy.deepcopy(self.ours).layers, self.stock.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


class QuantizedCacheMachine(CacheMachine):
    tolerance: ClassVar = {"rtol": 0.0, "atol": 1e-4}

    def make(self) -> tuple[HybridCache, DynamicCache]:
        ours, reference = QUANTIZED_VARIANTS[self.variant]
        return ours(), reference()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_sequence_of_operations_leaves_what_dynamic_cache_holds(variant: str):
    run(CacheMachine, variant)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("variant", QUANTIZED_VARIANTS)
def test_quantized_cache_when_any_operations_then_holds_dequantized_states(variant: str):
    run(QuantizedCacheMachine, variant)


def run(kind: type[CacheMachine], variant: str, **attributes: str) -> None:
    machine = type("Machine", (kind,), {"variant": variant, **attributes})
    run_state_machine_as_test(
        machine,
        settings=search_at_random(40, 100, stateful_step_count=20),
    )
