"""QuantizedHybridCache: its contents, its errors, and its moves. The contract is in tests/generation."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    DecodeOnCPU,
    HostMemoryError,
    HybridCache,
    KVCodec,
    Placement,
    QuantizedHybridCache,
    StaleHandleError,
    minmax,
    quanto,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.host_memory import Limit

from models.tiny_models import random_prompt, tiny_model

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, hidden_size=512, head_dim=64)


def states(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 8, num_tokens, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill(cache: HybridCache, num_tokens: int, dtype: torch.dtype = torch.float32, attends: bool = False) -> None:
    """Store states; `attends` lets a query attend to each layer: states that wait for it are quantized."""
    for layer in range(2):
        held = cache.update(states(num_tokens, layer, dtype), states(num_tokens, layer + 10, dtype), layer)
        if attends:
            scaled_dot_product_attention(states(1, layer + 20, dtype), *held)
        del held  # its memory is lent again to the next layer


fill_and_attend = partial(fill, attends=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("bits", "most"), [(8, 0.54), (4, 0.29), ((4, 2), 0.23), (2, 0.17)])
@pytest.mark.parametrize("cpu_decode", [True, False])
def test_bytes_held_for_a_long_context_are_a_fraction_of_those_of_bfloat16(bits, most: float, cpu_decode: bool):
    cache = QuantizedHybridCache(CONFIG, bits, cpu_decode=cpu_decode)
    for _ in range(4):
        fill_and_attend(cache, 16_384, torch.bfloat16)
        if cpu_decode:
            fill_and_attend(cache, 1, torch.bfloat16)  # from now on nothing is put together on the device
    full = 2 * 2 * 8 * 64 * 2 * cache.get_seq_length()
    report = cache.memory()
    # The shared memory holds one layer's keys and values in full precision, and an eighth more.
    shared = 0 if cpu_decode else full / 2 * 1.125
    assert report.host_bytes + report.device_bytes <= most * full + shared


def test_codes_take_memory_as_they_come():
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=True)
    sizes = []
    for _ in range(40):
        fill_and_attend(cache, 64)
        fill_and_attend(cache, 1)
        sizes.append(cache.memory().host_bytes)
    records = 2 * 8 * 2 * (64 * 64 // 2 + 64 * 4)
    steps = [later - earlier for earlier, later in pairwise(sizes[5:])]
    assert set(steps) <= {records, 2 * records}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("store", "cpu_decode", "reason"),
    [
        (fill_and_attend, True, "192 tokens before token 384 are infinite, not a number"),
        (fill_and_attend, False, "192 tokens before token 384 are infinite, not a number"),
        # Those that wait go on waiting; with cpu_decode=False the update would first quantize them.
        (fill, True, "320 tokens before token 384 are infinite, or not a number"),
    ],
)
def test_states_when_not_finite_then_are_refused_and_nothing_changes(
    store: Callable[..., None], cpu_decode: bool, reason: str, bad: float
):
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=cpu_decode)
    store(cache, 300)
    twin = copy.deepcopy(cache)
    broken = states(200, seed=5)
    broken[0, 3, 17, 2] = bad
    with pytest.raises(ValueError, match=rf"{reason}.* Nothing was stored"):
        cache.update(states(200), broken, 0)
    assert cache.layers[0].get_seq_length() == 300
    assert torch.equal(cache.layers[0].keys, twin.layers[0].keys)
    assert torch.equal(cache.layers[0].values, twin.layers[0].values)


def test_what_is_not_coded_yet_passes_on_what_is_not_a_number():
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=False)
    fill(cache, 300)
    broken = states(1)
    broken[0, 0, 0, 0] = float("nan")
    keys, _ = cache.update(broken, states(1), 0)
    assert torch.isnan(keys[0, 0, -1, 0])


def test_states_of_several_layers_can_be_held_at_once():
    cache = QuantizedHybridCache(CONFIG, bits=8, cpu_decode=False)
    fill(cache, 300)
    first = cache.update(states(1, 1), states(1, 2), 0)
    copies = [part.clone() for part in first]
    second = cache.update(states(1, 3), states(1, 4), 1)
    assert all(torch.equal(part, kept) for part, kept in zip(first, copies, strict=True))
    held = cache.memory().host_bytes
    del first, second
    cache.update(states(1, 5), states(1, 6), 0)
    cache.update(states(1, 5), states(1, 6), 1)
    assert cache.memory().host_bytes == held


def test_layers_that_are_not_named_stay_in_full_precision():
    cache = QuantizedHybridCache(CONFIG, bits={1: (4, 2)}, cpu_decode=False)
    fill_and_attend(cache, 300)
    assert [layer.store.packed is not None for layer in cache.layers] == [False, True]
    assert torch.equal(cache.layers[0].keys, states(300, 0))
    assert not torch.equal(cache.layers[1].keys, states(300, 1))


def without_kernel(name: str) -> KVCodec:
    """Return a codec for which there is no kernel."""
    if name == "quanto":
        pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]")
        return quanto(4)
    return KVCodec(minmax(8).values, minmax(8).keys)  # keys are grouped as values are


@torch.no_grad()
@pytest.mark.parametrize(("name", "error"), [("quanto", 0.3), ("swapped grouping", 0.05)])
def test_codec_when_without_kernel_then_is_decoded_for_each_step(name: str, error: float):
    model, ids, codec = tiny_model("llama"), random_prompt(1, 301), without_kernel(name)
    caches = (HybridCache(model.config, codec=codec), DynamicCache(config=model.config))
    for cache in caches:
        model(ids[:, :300], **cache_argument(cache))
    ours, theirs = (model(ids[:, 300:], **cache_argument(cache)).logits for cache in caches)
    assert 0 < (ours - theirs).norm() < error * theirs.norm()
    refused = HybridCache(model.config, Placement(cpu_decode=True), codec=codec)
    with pytest.raises(ValueError, match="There is no kernel that attends to"):
        model(ids, **cache_argument(refused))


def test_host_memory_when_too_small_then_refuses_before_storing(monkeypatch: pytest.MonkeyPatch):
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=True)
    fill(cache, 300)
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: Limit(2**20, ""))
    with pytest.raises(HostMemoryError, match=r"tokens need .* more host memory"):
        cache.update(states(20_000), states(20_000), 0)
    assert cache.layers[0].get_seq_length() == 300


def test_codes_when_cache_moves_then_stay_the_same():
    model = copy.deepcopy(tiny_model("llama"))
    ids = random_prompt(1, 200)
    cache = QuantizedHybridCache(model.config, bits=2, cpu_decode=False)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    before = [layer.store.packed.read()[0].clone() for layer in cache.layers]
    cache.to("cpu", torch.bfloat16)
    assert cache.layers[0].store.shape.key_dtype == torch.bfloat16
    after = [layer.store.packed.read()[0] for layer in cache.layers]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_decode_on_cpu_takes_a_quantized_cache_along():
    model = tiny_model("llama")
    ids = random_prompt(1, 200)
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(ids, **cache_argument(QuantizedHybridCache(model.config, bits=8)), **options)
    cache = QuantizedHybridCache(model.config, bits=8)
    actual = model.generate(ids, **cache_argument(cache), custom_generate=DecodeOnCPU(), **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("rotate", [True, "auto"])
def test_the_first_chunk_is_attended_to_as_it_came_by_the_kernel(rotate):
    cache = HybridCache(CONFIG, codec=minmax(4, rotate=rotate))
    keys, values = states(300, seed=1), states(300, seed=2)
    query = torch.randn(1, 16, 300, 64, generator=torch.Generator().manual_seed(3))
    handles = cache.update(keys, values, 0)
    out = scaled_dot_product_attention(query, *handles, is_causal=True, enable_gqa=True)
    assert cache.stats.kernel_seconds > 0
    expected = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    # Codes of 4 bits would be off by a thousand times as much.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(cache.layers[0].keys, keys)
    cache.crop(-1)
    with pytest.raises(StaleHandleError):
        scaled_dot_product_attention(query, *handles, is_causal=True, enable_gqa=True)
