"""Properties that only a CUDA device can show: streams, page-locked memory, device memory."""

import gc
from functools import partial

import pytest
import torch
from contracts.decoding import Watcher, decode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_hybrid_cache import (
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    minmax,
)
from hf_hybrid_cache.storage.memory import page_lock

from common.caches import stock
from models.tiny_models import random_model, random_prompt

pytestmark = pytest.mark.cuda

CONFIG = LlamaConfig(
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, hidden_size=512, head_dim=64, vocab_size=8
)


def states(num_tokens: int, seed: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, 8, num_tokens, 64, generator=generator, device="cuda", dtype=torch.bfloat16)


def fill(cache: Cache, *lengths: int) -> Cache:
    """Let each layer have new states of so many tokens, in turn; those of a layer are the same for any cache."""
    for num_tokens in lengths:
        for layer in range(8):
            cache.update(states(num_tokens, layer), states(num_tokens, layer + 8), layer)
    return cache


@pytest.mark.parametrize(("bits", "rotate"), [(8, True), (4, False), (2, True)])
def test_records_made_on_the_gpu_are_read_on_the_cpu(bits: int, rotate: bool):
    codec = minmax(bits, rotate=rotate)
    given = states(192, seed=0)
    for role in (codec.keys, codec.values):
        records = role.encode(given)
        on_gpu, on_cpu = torch.empty_like(given), torch.empty_like(given, device="cpu")
        role.decode(records, on_gpu)
        role.decode(records.cpu(), on_cpu)
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-2, atol=1e-3)


def kernels_of_a_step(make) -> float:
    """Count the kernels that one decode step of one layer launches on the GPU, its attention included."""
    cache, query, new = fill(make(CONFIG), 2048), states(1, 0), states(1, 1)

    def step() -> None:
        for layer in range(8):
            keys, values = cache.update(new, new, layer)
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith("Mem") for event in on_gpu) / 8


# The most kernels a layer beyond those of `DynamicCache`.
MOST_KERNELS = {
    "dynamic": (DynamicHybridCache, 0),
    "offloaded": (OffloadedHybridCache, 4),  # blocks are taken apart, and put together
    "codes": (partial(HybridCache, codec=minmax(4, rotate=True)), 6),
    "streamed codes": (partial(HybridCache, placement=Placement(offload=True), codec=minmax(4, rotate=True)), 6),
}


@pytest.mark.parametrize("name", MOST_KERNELS)
def test_a_decode_step_launches_few_kernels_beyond_those_of_dynamic_cache(name: str):
    make, most = MOST_KERNELS[name]
    assert kernels_of_a_step(make) <= kernels_of_a_step(stock) + most


def test_memory_that_cannot_be_page_locked_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_lock, "_has_warned", False)
    memory = torch.empty(2**20, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 4096) * 4096
    assert int(torch.cuda.cudart().cudaHostRegister(address, 4096, 0)) == 0
    try:
        lock = page_lock.PageLock(memory[address - memory.data_ptr() :], torch.device("cuda", 0))
        with pytest.warns(UserWarning, match="refused to page-lock"):
            lock.extend(0, 4096, 1)
        assert lock.refused
        # The refusal must not come back as the error of the next kernel.
        assert (torch.ones(8, device="cuda") + 1).sum() == 16
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)


def test_host_memory_is_page_locked_and_copies_do_not_block_the_caller():
    cache = fill(OffloadedHybridCache(CONFIG), 4096)
    torch.cuda.synchronize()
    streamed = cache.layers[3].store.streamed
    assert streamed.keys.stored_rows(1).is_pinned()
    torch.cuda._sleep(2_000_000_000)
    streamed.truncate(4095)
    streamed.write(states(1), states(1), on_device=True)
    saved = streamed.saved
    # The call came back although the copy still stands behind a second of other work.
    assert not saved.query()
    torch.cuda.synchronize()
    assert saved.query()


def test_device_memory_when_layers_are_offloaded_then_lacks_their_bytes():
    def peak(make) -> tuple[int, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache = fill(make(CONFIG), *[1024] * 16)
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


# --- DecodeOnCPU


def a_model_of_half_a_gigabyte() -> LlamaForCausalLM:
    """Random, in float32; 2,048 tokens of its keys and values are 128 MiB."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "num_hidden_layers": 8}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 1024, "max_position_embeddings": 4096}
    config = LlamaConfig(**heads, **sizes, eos_token_id=None, pad_token_id=0)
    return random_model(config).to("cuda")


@pytest.mark.parametrize("make_cache", [DynamicHybridCache, OffloadedHybridCache])
def test_the_gpu_is_given_back_while_the_cpu_decodes(make_cache):
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model = a_model_of_half_a_gigabyte()
    weights = torch.cuda.memory_allocated() - before
    assert weights > 400 * 2**20
    cache = make_cache(model.config)
    memory = Watcher(lambda: (torch.cuda.memory_allocated() - before, torch.cuda.memory_reserved() - reserved_before))
    decode(model, random_prompt(1, 2048), cache, max_new_tokens=4, custom_generate=DecodeOnCPU(), streamer=memory)
    assert memory.notes[0][0] >= weights
    assert len(memory.notes) == 5
    for allocated, reserved in memory.notes[1:]:
        assert allocated <= 64 * 2**20
        assert reserved <= 128 * 2**20
    assert model.device.type == "cuda"
    assert torch.cuda.memory_allocated() - before >= weights
