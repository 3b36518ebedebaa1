"""Callers read keys and values of layers, and set others."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.layers import HybridLayer

from common.caches import CACHES, CHOOSING, group_of_one, stock
from models.tiny_models import llama, random_prompt, tiny_model

CONFIG = llama()
TOKENS = 300
ALL = CACHES | CHOOSING
EDITABLE = {name: make for name, make in ALL.items() if name != "shared_with_nobody"}
Edit = Callable[[Cache], None]


def filled(make: Callable[[PreTrainedConfig], Cache], mode: Callable = torch.no_grad) -> Cache:
    cache = make(CONFIG)
    with mode():
        tiny_model("llama")(random_prompt(1, TOKENS), **cache_argument(cache), logits_to_keep=1)
    return cache


def next_logits(cache: Cache) -> torch.Tensor:
    with torch.no_grad():
        return tiny_model("llama")(random_prompt(1, 1, seed=1), **cache_argument(cache)).logits


def steer(cache: Cache) -> None:
    for layer in cache.layers:
        keys, values = layer.keys.clone(), layer.values.clone()
        values[:, :, -20:] += 3
        replace(layer, keys, values)


def evict(cache: Cache) -> None:
    kept = torch.cat([torch.arange(50), torch.arange(180, TOKENS)])
    for layer in cache.layers:
        replace(layer, layer.keys[:, :, kept], layer.values[:, :, kept])


def lengthen(cache: Cache) -> None:
    for layer in cache.layers:
        replace(layer, *(torch.cat([each, each[:, :, :70]], dim=2) for each in (layer.keys, layer.values)))


def replace(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(layer, HybridLayer):
        layer.set(keys, values)
    else:
        layer.keys, layer.values = keys, values


@pytest.mark.default("values")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edit", [steer, evict, lengthen])
@pytest.mark.parametrize("name", EDITABLE)
def test_states_that_are_set_before_a_step_then_count_as_with_stock(name: str, edit: Edit, mode: Callable):
    ours, theirs = filled(ALL[name], mode), filled(stock, mode)
    untouched = next_logits(copy.deepcopy(theirs))
    with mode():
        edit(ours)
        edit(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    expected = next_logits(theirs)
    assert (next_logits(ours) - expected).abs().max() < (0.2 if "8 bits" in name else 1e-4)
    assert (expected - untouched).abs().max() > 0.5  # the edit is seen


@pytest.mark.parametrize("name", ALL)
def test_states_that_were_read_when_written_to_then_are_refused(name: str):
    layer = filled(ALL[name]).layers[0]
    for read in (layer.keys, layer.values, layer.values[:, :, -1]):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            read += 1
    with pytest.raises(AttributeError, match="keys"):
        layer.keys = layer.keys


def test_memory_of_states_that_nobody_holds_then_is_used_again():
    quantized = filled(lambda config: QuantizedHybridCache(config, bits=8, cpu_decode=False))
    cache = filled(lambda config: DynamicHybridCache(config, cpu_decode=False))
    next_logits(quantized)
    held = quantized.memory().host_bytes
    places = [layer.store.dense.keys.stored_rows(1).data_ptr() for layer in cache.layers]
    for _ in range(3):
        next_logits(quantized)
        cache.crop(-5)
        next_logits(cache)
    assert quantized.memory().host_bytes == held
    assert [layer.store.dense.keys.stored_rows(1).data_ptr() for layer in cache.layers] == places


@pytest.mark.parametrize("name", ["dynamic", "default", "8 bits"])
def test_layers_when_read_or_set_take_memory_of_one_and_are_saved(tmp_path, name: str):
    cache = filled(ALL[name])
    values = cache.layers[0].values.clone()
    values[:, :, -1] = 7
    cache.layers[0].set(cache.layers[0].keys, values)
    read = [weakref.ref(layer.keys.untyped_storage()) for layer in cache.layers]
    assert [each() is not None for each in read] == [False] * (len(read) - 1) + [True]
    copied = copy.deepcopy(cache)
    cache.save(tmp_path / "edited.kv")
    loaded = HybridCache.load(tmp_path / "edited.kv", CONFIG)
    for each in (cache, copied, loaded):
        assert (each.layers[0].values[:, :, -1] == 7).all()
    last = weakref.ref(cache.layers[0].values.untyped_storage())
    assert last() is not None
    next_logits(cache)
    assert last() is None


def test_states_that_were_read_stay_what_they_were_as_tokens_come():
    cache = filled(OffloadedHybridCache)
    values = cache.layers[0].values
    before = values.clone()
    next_logits(cache)
    assert cache.layers[0].values.shape[2] == TOKENS + 1
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", ["dynamic", "split_in_three", "8 bits streamed"])
def test_keys_when_set_without_as_many_values_then_are_refused(name: str):
    cache = filled(EDITABLE[name])
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match="same first three sizes"):
        cache.layers[1].set(cache.layers[1].keys[:, :, :100], cache.layers[1].values)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_states_when_codec_cannot_hold_them_then_layer_is_unchanged():
    cache = filled(lambda config: HybridCache(config, codec=minmax(8, rotate=True)))
    layer = cache.layers[0]
    keys, values = layer.keys.clone(), layer.values.clone()
    wrong = keys.clone()
    wrong[:, :, 80] = torch.inf
    with pytest.raises(ValueError, match="no codes stand for such"):
        layer.set(wrong, values)
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, values)
    next_logits(cache)


def test_empty_layers_take_states():
    cache, shape = DynamicHybridCache(CONFIG), (1, 2, 70, 16)
    for layer in cache.layers:
        layer.set(torch.ones(shape), torch.zeros(shape))
    assert cache.get_seq_length() == 70
    assert torch.equal(cache.layers[3].values, torch.zeros(shape))
    next_logits(cache)


@pytest.mark.skipif(group_of_one() is None, reason="this torch has no gloo")
def test_states_of_a_shared_layer_when_set_then_are_refused():
    cache = filled(lambda config: DynamicHybridCache(config, group=group_of_one()))
    with pytest.raises(RuntimeError, match="load it with group="):
        cache.layers[0].set(cache.layers[0].keys, cache.layers[0].values)
