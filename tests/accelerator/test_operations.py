"""Random sequences of everything a cache can be asked, on an accelerator that runs its work in any order."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import initialize, rule
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, Placement
from hf_hybrid_cache.storage import InitialCapacity

from accelerator.orders import CONFIG, HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, ORDERS, in_order, kept, sent
from operations.test_stateful import CacheMachine, run


def growing(*args, **options) -> HybridCache:
    cache = HybridCache(CONFIG, Placement(True, *args, **options))
    cache._stores.capacity = InitialCapacity(host_tokens=70)
    return cache


VARIANTS = {
    "on the device": lambda: DynamicHybridCache(CONFIG, cpu_decode=False),
    "streamed": lambda: OffloadedHybridCache(CONFIG, cpu_decode=False),
    "streamed, pageable": lambda: HybridCache(CONFIG, Placement(True, pin_memory=False, cpu_decode=False)),
    "streamed, growing": partial(growing, 1, 2),
    "streamed without prefetch": partial(growing, 0, 1),
    "all prefetched": lambda: OffloadedHybridCache(CONFIG, prefetch_layers=9, cpu_decode=False),
    "attended to on the CPU": partial(growing, 1, 0, cpu_decode=True),
    "attended to on the CPU in part": partial(growing, 1, 0, cpu_decode=(1, 3)),
}


class AcceleratorMachine(CacheMachine):
    """A machine that compares states only at the end, so that comparing does not order the work."""

    order: str

    def make(self) -> tuple[HybridCache, DynamicCache]:
        return VARIANTS[self.variant](), DynamicCache(config=CONFIG)

    @initialize(batch=st.integers(1, 3), seed=st.integers(0, 2**31))
    def start(self, batch: int, seed: int) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.running = in_order(self.order, seed)
        self.running.__enter__()
        super().start(batch)

    @rule(new_tokens=st.sampled_from([1, 1, 2, 63, 64, 65, 255, 257]), layers=st.just(NUM_LAYERS))
    def update(self, new_tokens: int, layers: int) -> None:
        for layer in range(layers):
            shape = (self.batch, NUM_KV_HEADS, new_tokens, HEAD_DIM)
            new = [torch.randn(shape, generator=self.generator).pin_memory() for _ in range(2)]
            ours = self.ours.update(*map(sent, new), layer)
            theirs = self.stock.update(*new, layer)
            self.given += [(kept(part), other) for part, other in zip(ours, theirs, strict=True)]
            del ours

    @rule(layer=st.integers(0, NUM_LAYERS - 1))
    def look(self, layer: int) -> None:
        if self.num_tokens > 0:
            self.given.append((kept(self.ours.layers[layer].keys), self.stock.layers[layer].keys))

    def holds_the_same_after_each_step(self) -> None:
        """Skip the comparison, which would order the work of the device."""

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        try:
            torch.accelerator.synchronize()
            for ours, theirs in self.given:
                assert torch.equal(ours, theirs)
            super().teardown()
        finally:
            self.running.__exit__(None, None, None)

    def holds_the_same(self) -> None:
        self.ours.to("cpu")
        super().holds_the_same()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_on_accelerator_when_any_operations_then_as_dynamic_cache(variant: str, order: str):
    run(AcceleratorMachine, variant, order=order)
