"""Codecs that a cache chooses by itself: when, from what data, for how long, and without side effects."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import HybridCache, Placement, QuantizedHybridCache, minmax
from hf_hybrid_cache.layers import layer_stores

from common.modes import read
from models.tiny_models import random_prompt, tiny_model

pytestmark = pytest.mark.usefixtures("short_prompts_choose")
# A prompt of so many tokens and one more has its first block quantized.
UNTIL_QUANTIZED = 191
CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=256, head_dim=64)
PLACES = {
    "host": Placement(),
    "device": Placement(cpu_decode=False),
    "streamed": Placement(offload=True, cpu_decode=False),
}


def states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """`[1, 2, tokens, 64]`, with channels that differ, so that codecs scale them."""
    scales = torch.logspace(-1, 1, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(9))]
    return torch.randn(1, 2, num_tokens, 64, generator=torch.Generator().manual_seed(seed)) * scales


def fill(cache: HybridCache, num_tokens: int, seed: int = 0) -> None:
    """Store states of all layers, in tensors that are written to afterwards."""
    for layer in range(3):
        keys, values = states(num_tokens, seed + layer), states(num_tokens, seed + layer + 10)
        cache.update(keys, values, layer)
        keys[:], values[:] = 0, 0


def code(cache: HybridCache) -> None:
    """Have the states quantized that wait for queries: a selection of sequences does not go on waiting."""
    cache.reorder_cache(torch.tensor([0]))


def are_fitted(cache: HybridCache) -> list[bool]:
    return [codec.is_fitted for codec in cache.codecs.values()]


def run(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int) -> None:
    """Let the model read tokens in chunks."""
    for piece in ids.split(chunk, dim=1):
        read(model, piece, cache)


@pytest.mark.default("values")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [1, 64, UNTIL_QUANTIZED, UNTIL_QUANTIZED + 1])
def test_the_choice_is_made_when_the_first_block_is_coded_and_never_again(chunk: int, place: str):
    model = tiny_model("llama")
    cache = HybridCache(model.config, PLACES[place], codec=minmax(4))
    ids = random_prompt(1, 300)
    for start in range(0, UNTIL_QUANTIZED - chunk + 1, chunk):
        read(model, ids[:, start : start + chunk], cache)
        assert not any(are_fitted(cache))
    read(model, ids[:, cache.get_seq_length() :], cache)
    assert all(are_fitted(cache))
    chosen = cache.codecs
    read(model, random_prompt(1, 200, seed=1), cache)
    assert cache.codecs == chosen


@pytest.mark.default("pairs")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [1000, 150])
def test_the_queries_of_a_prompt_are_seen_however_it_is_attended_to(implementation: str, place: str, chunk: int):
    """Scaling channels of the keys, and those of the queries inversely, changes the factors by the inverse scales."""
    ids, factors = random_prompt(1, 400), []
    scale = torch.tensor([8.0, 1.0, 0.25, 1.0]).repeat(4)
    for is_scaled in (False, True):
        model = copy.deepcopy(tiny_model("llama"))
        model.set_attn_implementation(implementation)
        if is_scaled:
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.self_attn.k_proj.weight *= scale.repeat(2)[:, None]
                    layer.self_attn.q_proj.weight /= scale.repeat(4)[:, None]
        cache = HybridCache(model.config, PLACES[place], codec=minmax(8))
        run(model, cache, ids, chunk)
        weights = [codec.keys.channel_scaling.weights for codec in cache.codecs.values()]
        factors.append(torch.stack([each / each.log().mean(dim=1, keepdim=True).exp() for each in weights]))
    expected = factors[0] / scale * scale.log().mean().exp()
    # Rotary embedding mixes channels in pairs, which here have the same scale; rounding to bfloat16 comes on top.
    torch.testing.assert_close(factors[1], expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("place", PLACES)
def test_the_choice_stays_through_reset_crop_reorder_copies_and_files(place: str, tmp_path: Path):
    cache = HybridCache(CONFIG, PLACES[place], codec=minmax(4))
    fill(cache, 300)
    cache.crop(-20)
    chosen = cache.codecs
    assert all(are_fitted(cache))
    cache.crop(-200)
    fill(cache, 200, seed=50)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    assert copy.deepcopy(cache).codecs == cache.codecs == chosen
    cache.reset()
    with pytest.raises(ValueError, match=r"chosen for 2 KV heads of 64, and there are 4 of 64"):
        cache.update(torch.zeros(1, 4, 9, 64), torch.zeros(1, 4, 9, 64), 0)
    cache.save(tmp_path / "cache.kv")
    for each in (cache, HybridCache.load(tmp_path / "cache.kv", CONFIG)):
        fill(each, 300, seed=90)
        code(each)
        assert each.codecs == chosen


def attend(cache: HybridCache, num_tokens: int, overwrites: bool = False) -> None:
    """Store states of all layers, and attend to them with queries that have their own scales."""
    for layer in range(3):
        query = states(num_tokens, 20 + layer).repeat(1, 2, 1, 1).flip(3)
        new = states(num_tokens, 30 + layer), states(num_tokens, 40 + layer)
        held = cache.update(*new, layer)
        for each in new if overwrites else ():
            each.zero_()
        scaled_dot_product_attention(query, *held, enable_gqa=True)


@pytest.mark.parametrize("num_tokens", [UNTIL_QUANTIZED, UNTIL_QUANTIZED + 1, 400])
def test_codes_when_a_caller_overwrites_what_it_gave_then_are_the_same(num_tokens: int):
    ours, theirs = (HybridCache(CONFIG, PLACES["host"], codec=minmax(4)) for _ in range(2))
    attend(ours, num_tokens)
    attend(theirs, num_tokens, overwrites=True)
    assert are_fitted(ours) == [num_tokens > UNTIL_QUANTIZED] * 3
    assert theirs.codecs == ours.codecs
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


@pytest.mark.parametrize("place", [*PLACES, "split"])
def test_looking_at_a_cache_when_states_await_queries_then_changes_nothing(place: str, tmp_path: Path):
    placement = PLACES.get(place, Placement(cpu_decode=True, device_tokens=192))
    caches = [HybridCache(CONFIG, placement, codec=minmax(4)) for _ in range(2)]
    # On a device states that come after others do not wait.
    chunks = (400,) if place in ("device", "streamed") else (100, 300)
    for cache in caches:
        for num_tokens in chunks:
            fill(cache, num_tokens)
    held = [(layer.store.waiting_bytes, layer.store.version) for layer in caches[0].layers]
    assert min(held)[0] > 0
    assert caches[0].memory().device_bytes + caches[0].memory().host_bytes > sum(number for number, _ in held)
    assert "some to be quantized" in repr(caches[0])
    for look in (HybridCache.memory, str, copy.deepcopy, HybridCache.checkpoint):
        look(caches[0])
    caches[0].save(tmp_path / "cache.kv")
    assert torch.equal(caches[0].layers[0].keys, torch.cat([states(each) for each in chunks], dim=2))
    assert torch.equal(caches[0].layers[0].values, torch.cat([states(each, 10) for each in chunks], dim=2))
    assert not any(are_fitted(caches[0]))
    assert [(layer.store.waiting_bytes, layer.store.version) for layer in caches[0].layers] == held
    caches += [copy.deepcopy(caches[0]), HybridCache.load(tmp_path / "cache.kv", CONFIG)]
    threads = torch.get_num_threads()
    for number in reversed(range(4)):
        torch.set_num_threads(1 + number % 2)  # which changes nothing
        try:
            attend(caches[number], 20)
        finally:
            torch.set_num_threads(threads)
        assert [are_fitted(each) for each in caches] == [[each >= number] * 3 for each in range(4)]
    for cache in caches[1:]:
        assert cache.codecs == caches[0].codecs
        for ours, theirs in zip(cache.layers, caches[0].layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("place", PLACES)
def test_only_so_many_bytes_are_held_where_queries_are_not_seen(place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer_stores, "MOST_HELD_BYTES", 2 * states(300).nbytes)
    cache = HybridCache(CONFIG, PLACES[place], codec=minmax(4))
    for layer, expected in enumerate(([False] * 3, [False] * 3, [True, False, False])):
        cache.update(states(300), states(300), layer)
        assert are_fitted(cache) == expected
    assert cache.memory().num_tokens == 300


def test_states_when_added_without_attention_then_await_first_queries():
    """A cache may be filled from another one before a model uses it."""
    model, ids, chosen = tiny_model("llama"), random_prompt(1, 320), []
    plain = DynamicCache(config=model.config)
    run(model, plain, ids[:, :300], 300)
    for size in (250, 300):
        cache = HybridCache(model.config, codec=minmax(4))
        for index, layer in enumerate(plain.layers):
            for piece in zip(layer.keys.split(size, 2), layer.values.split(size, 2), strict=True):
                cache.update(*piece, index)
        assert not any(are_fitted(cache))
        run(model, cache, ids[:, 300:], 20)
        assert cache.get_seq_length() == 320
        chosen.append(cache.codecs)
    assert chosen[0] == chosen[1]
    unseen = HybridCache(model.config, codec=minmax(4))
    for index, layer in enumerate(plain.layers):
        unseen.update(layer.keys, layer.values, index)
    code(unseen)
    assert unseen.codecs != cache.codecs


def test_printing_a_cache_tells_how_its_layers_are_coded():
    cache = QuantizedHybridCache(CONFIG, bits={0: (4, 2), 2: (4, 2), 1: 8})
    assert "  layers 0, 2: keys 4 bits (to be chosen), values 2 bits (to be chosen)\n" in str(cache)
    fill(cache, 300)
    code(cache)
    assert "  layers 1: keys 8 bits (channel-scaled, rotated), values 8 bits (mixed, rotated)" in str(cache)
    asked_for = HybridCache(CONFIG, codec=minmax(4, rotate=False))
    fill(asked_for, 300)
    assert asked_for.codecs == dict.fromkeys(range(3), minmax(4, rotate=False))
    assert str(asked_for).endswith("keys 4 bits (plain), values 4 bits (plain)")


def hostile(num_tokens: int, seed: int) -> torch.Tensor:
    """Keys that four bits cannot hold: a few tokens of each block are far off in all channels."""
    keys = states(num_tokens, seed)
    keys[:, :, ::16] *= 30
    return keys


@pytest.mark.parametrize("place", PLACES)
def test_auto_bits_when_keys_are_hostile_then_that_layer_gets_more(place: str, tmp_path: Path):
    cache = HybridCache(CONFIG, PLACES[place], codec=minmax(4, auto_bits=True))
    for chunk in range(2):
        for layer in range(3):
            keys = hostile(300, chunk) if layer == 1 else states(300, chunk) / 10
            query = torch.randn(1, 4, 300, 64, generator=torch.Generator().manual_seed(chunk))
            held = cache.update(keys, states(300, 5 + chunk), layer)
            scaled_dot_product_attention(query, *held, enable_gqa=True)
    assert [codec.keys.bits for codec in cache.codecs.values()] == [4, 8, 4]
    assert [codec.values.bits for codec in cache.codecs.values()] == [4, 4, 4]
    assert "layers 1: keys 8 bits" in str(cache)
    pinned = HybridCache(CONFIG, PLACES[place], codec=cache.codecs)
    for chunk in range(2):
        pinned.update(hostile(300, chunk), states(300, 5 + chunk), 1)
    cache.save(tmp_path / "cache.kv")
    for each in (cache, copy.deepcopy(cache), HybridCache.load(tmp_path / "cache.kv", CONFIG)):
        assert each.codecs == pinned.codecs
        assert torch.equal(each.layers[1].keys, pinned.layers[1].keys)
    cache.reset()
    fill(cache, 300)
    assert cache.codecs == pinned.codecs


def test_more_bits_take_at_most_half_as_much_memory_more():
    sizes = []
    for auto_bits in (False, True):
        config = LlamaConfig(num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        cache = HybridCache(config, codec=minmax(2, auto_bits=auto_bits))
        for layer in range(12):
            held = cache.update(hostile(512, layer), states(512), layer)
            scaled_dot_product_attention(torch.randn(1, 4, 512, 64), *held, enable_gqa=True)
        sizes.append(cache.memory().host_bytes)
    assert len({codec.keys.bits for codec in cache.codecs.values()}) > 1
    assert 1.05 < sizes[1] / sizes[0] <= 1.5
