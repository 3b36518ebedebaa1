"""What only a CUDA device can show: streams, page-locked memory, device memory."""

import pytest
import torch
from transformers import LlamaConfig

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache
from hf_hybrid_cache.storage import KVShape
from hf_hybrid_cache.storage.host_buffer import _lock
from hf_hybrid_cache.storage.staging import Slot
from hf_hybrid_cache.storage.streams import AcceleratorStreams

from caches import CACHES, stock
from tiny_models import FAMILIES, llama, random_prompt, tiny_model

pytestmark = pytest.mark.cuda

CONFIG = LlamaConfig(
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, hidden_size=512, head_dim=64, vocab_size=8
)


STEPS = (700, 1, 1, 65, 1)


def states(num_tokens: int, seed: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, 8, num_tokens, 64, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_the_gpu_equal_those_of_dynamic_cache(cache: str, family: str):
    model = tiny_model(family).to("cuda")
    try:
        ids = random_prompt(2, 40).to("cuda")
        outputs = [
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=make(model.config),
                max_new_tokens=40,
                do_sample=False,
            )
            for make in (CACHES[cache], stock)
        ]
    finally:
        model.to("cpu")
    assert torch.equal(*outputs)


class SlowCopies(AcceleratorStreams):
    """Copies that start late, by `cycles` of the GPU's clock, so that whoever does not wait reads old data."""

    cycles = 20_000_000

    def _run(self, stream, copy, after):
        def slow_copy() -> None:
            torch.cuda._sleep(self.cycles)
            copy()

        return super()._run(stream, slow_copy, after)


@pytest.mark.parametrize("slow", ["copies", "computation"])
@pytest.mark.parametrize("options", [(1, 0), (0, 0), (2, 2)], ids=["prefetch_1", "no_prefetch", "partly_resident"])
def test_computation_and_copies_wait_for_each_other(options, slow: str, monkeypatch: pytest.MonkeyPatch):
    """Whichever is late, it is waited for. Nothing here makes the host wait before the end."""
    if slow == "copies":
        monkeypatch.setattr("hf_hybrid_cache.layer.streams_for", SlowCopies)
    new = [
        [states(tokens, seed=100 * step + layer, batch=2) for layer in range(8)] for step, tokens in enumerate(STEPS)
    ]
    cache = OffloadedHybridCache(CONFIG, *options)
    right = torch.ones((), dtype=torch.bool, device="cuda")
    for step in range(len(STEPS)):
        for layer in range(8):
            if slow == "computation":
                torch.cuda._sleep(SlowCopies.cycles)
            keys, values = cache.update(new[step][layer], -new[step][layer], layer)
            if slow == "computation":
                torch.cuda._sleep(SlowCopies.cycles)
            expected = torch.cat([new[past][layer] for past in range(step + 1)], dim=2)
            right &= (keys == expected).all() & (values == -expected).all()
            del keys, values
    assert right
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer in range(8):
        expected = torch.cat([new[step][layer] for step in range(len(STEPS))], dim=2)[[1, 0], :, :-3]
        assert torch.equal(cache.layers[layer].keys, expected)


def test_a_slot_dropped_with_copies_under_way_harms_nobody():
    shape = KVShape.of(states(1, 0), states(1, 0))
    host = torch.ones(4096, 1, 8, 64, dtype=torch.bfloat16).pin_memory()
    for _ in range(5):
        streams = SlowCopies(shape.device)
        slot = Slot(shape, streams)
        slot.make_room(shape, 4096, keep=0)
        target = slot.keys.rows(0, 4096)
        slot.arrived = streams.copy_to_device(
            lambda target=target: target.copy_(host, non_blocking=True), after=[streams.computed()]
        )
        del slot, target
        others = [torch.zeros(1, 8, 4096, 64, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert not any(other.any() for other in others)


def test_memory_that_cannot_be_page_locked_is_used_all_the_same():
    memory = torch.empty(2**20, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 4096) * 4096
    assert int(torch.cuda.cudart().cudaHostRegister(address, 4096, 0)) == 0
    try:
        with pytest.warns(UserWarning, match="refused to page-lock"):
            assert not _lock(address, 4096, torch.device("cuda", 0))
        # The refusal must not come back as the error of the next kernel.
        assert (torch.ones(8, device="cuda") + 1).sum() == 16
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)


def test_host_memory_is_page_locked_and_copies_do_not_block_the_caller():
    cache = OffloadedHybridCache(CONFIG)
    for layer in range(8):
        cache.update(states(4096, layer), states(4096, layer), layer)
    torch.cuda.synchronize()
    store = cache.layers[3].store
    assert store.keys.rows(0, 1).is_pinned()
    torch.cuda._sleep(2_000_000_000)
    saved = store.staging.save(store, store.staging.open(store, store.num_tokens), 0, 1)
    # The call came back although the copy still stands behind a second of other work.
    assert not saved.query()
    torch.cuda.synchronize()
    assert saved.query()


def test_pageable_memory_gives_the_same_states():
    pinned, pageable = OffloadedHybridCache(CONFIG), OffloadedHybridCache(CONFIG, pin_memory=False)
    for _ in range(2):
        for layer in range(8):
            ours = [cache.update(states(300, layer), states(300, layer), layer)[0] for cache in (pinned, pageable)]
            assert torch.equal(*ours)
    assert not pageable.layers[0].store.keys.rows(0, 1).is_pinned()


def test_the_device_holds_less_than_with_dynamic_cache_by_the_layers_that_left_it():
    def peak(make) -> tuple[int, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache = make(CONFIG)
        for _ in range(16):
            for layer in range(8):
                cache.update(states(1024, layer), states(1024, layer), layer)
        torch.cuda.synchronize()
        held = cache.memory().device_bytes if hasattr(cache, "memory") else None
        return torch.cuda.max_memory_allocated() - before, held

    content = 8 * 16 * 1024 * 2 * 8 * 64 * 2
    stock_peak, _ = peak(stock)
    ours_peak, ours_held = peak(OffloadedHybridCache)
    assert stock_peak >= content
    # Two of eight layers are staged, with an eighth of slack; the rest is the states that come in.
    assert ours_held <= content * 2 / 8 * 1.15 + 2**20
    assert ours_peak < stock_peak - content / 2


def test_a_dynamic_cache_grows_by_one_chunk_or_not_at_all_with_a_max_length():
    cache = DynamicHybridCache(CONFIG, max_length=5000)
    keys, _ = cache.update(states(10, 0), states(10, 0), 0)
    pointer = keys.data_ptr()
    keys, _ = cache.update(states(4990, 0), states(4990, 0), 0)
    assert keys.data_ptr() == pointer
    assert cache.memory().device_bytes == 5000 * 2 * 8 * 64 * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices_use_streams_and_slots_of_their_own():
    cache = OffloadedHybridCache(llama())
    for _ in range(3):
        for layer in range(4):
            device = f"cuda:{layer // 2}"
            new = torch.ones(1, 2, 100, 16, device=device)
            keys, _ = cache.update(new, new, layer)
            assert keys.device == torch.device(device)
            assert torch.equal(keys, torch.ones_like(keys))
    assert len(cache._stores.stagings) == 2
