"""Callers read, keep, edit and assign keys and values of layers, as with stock's."""

import copy
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument

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
        layer.values[:, :, -20:] += 3
    cache.layers[1].keys[0, 1, 100:103].mul_(-1)


def evict(cache: Cache) -> None:
    kept = torch.cat([torch.arange(50), torch.arange(180, TOKENS)])
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, kept]
        layer.values = layer.values[:, :, kept]


def edit_twice_with_a_question_between(cache: Cache) -> None:
    values = cache.layers[2].values
    values[:, :, 10] += 5
    cache.get_seq_length()
    list(cache.layers[2].values.shape)
    values[:, :, 200:] += 5


def assign_longer_keys_of_all_layers_first(cache: Cache) -> None:
    for name in ("keys", "values"):
        for layer in cache.layers:
            states = getattr(layer, name)
            setattr(layer, name, torch.cat([states, states[:, :, :70]], dim=2))


@pytest.mark.default("values")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "edit", [steer, evict, edit_twice_with_a_question_between, assign_longer_keys_of_all_layers_first]
)
@pytest.mark.parametrize("name", EDITABLE)
def test_edit_of_layer_keys_before_a_step_then_counts_as_with_stock(name: str, edit: Edit, mode: Callable):
    ours, theirs = filled(ALL[name], mode), filled(stock, mode)
    untouched = next_logits(copy.deepcopy(theirs))
    with mode():
        edit(ours)
        edit(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    expected = next_logits(theirs)
    assert (next_logits(ours) - expected).abs().max() < (0.2 if "8 bits" in name else 1e-4)
    assert (expected - untouched).abs().max() > 0.5  # the edit is seen


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
def test_layers_when_read_or_edited_then_take_memory_of_one_and_are_saved(tmp_path, name: str):
    cache = filled(ALL[name])
    cache.layers[0].values[:, :, -1] = 7
    read = list(read_all(cache))
    assert name == "dynamic" or [each() is not None for each in read] == [False] * (len(read) - 1) + [True]
    copied = copy.deepcopy(cache)
    cache.save(tmp_path / "edited.kv")
    loaded = HybridCache.load(tmp_path / "edited.kv", CONFIG)
    for each in (cache, copied, loaded):
        assert (each.layers[0].values[:, :, -1] == 7).all()


def test_read_states_are_the_layers_own_until_the_next_step():
    theirs, ours = filled(stock), filled(OffloadedHybridCache)
    logits = []
    for cache in (theirs, ours):
        values = cache.layers[0].values
        assert cache.layers[0].values.data_ptr() == values.data_ptr()
        next_logits(cache)
        assert cache.layers[0].values.data_ptr() != values.data_ptr()
        values += 3
        logits.append(next_logits(cache))
    assert torch.allclose(*logits, atol=1e-5)


def test_layer_when_read_after_its_edit_then_gives_what_is_stored():
    cache = filled(ALL["8 bits"])
    cache.layers[0].values[:, :, 150] += 3
    copied = copy.deepcopy(cache)  # which stores the edit, quantized anew
    assert torch.equal(cache.layers[0].values, copied.layers[0].values)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_edit_of_what_is_left_of_a_layer_read_long_ago_then_counts(mode: Callable):
    cache = filled(lambda config: OffloadedHybridCache(config, cpu_decode=True))
    with mode():
        rows, columns = cache.layers[0].values[:, :, :10], cache.layers[0].values.detach()[..., :1]
        rows[:, :, 0] = 1
        list(read_all(cache))
        rows[:, :, 1] = 2
        del rows
        list(read_all(cache))
        columns[:, :, 2] = 3
        del columns
        list(read_all(cache))
        assert cache.layers[0].store.read()[1][0, 0, :3, 0].tolist() == [1, 2, 3]


def read_all(cache: Cache) -> Iterator[weakref.ref]:
    """Read all layers, and yield whether the memory of each is still kept."""
    for layer in cache.layers:
        yield weakref.ref(layer.keys.untyped_storage())


@pytest.mark.parametrize("name", ["dynamic", "split_in_three", "8 bits streamed"])
def test_keys_when_assigned_without_values_then_are_refused(name: str):
    cache = filled(EDITABLE[name])
    before = [layer.keys.clone() for layer in cache.layers]
    cache.layers[1].keys = cache.layers[1].keys[:, :, :100]
    with pytest.raises(ValueError, match="same first three sizes"):
        next_logits(cache)
    cache.layers[1].set(*(states.clone() for states in (before[1], cache.layers[1].values)))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_states_when_codec_cannot_hold_them_then_layer_is_unchanged():
    cache = filled(lambda config: HybridCache(config, codec=minmax(8, rotate=True)))
    layer = cache.layers[0]
    keys, values = layer.keys.clone(), layer.values.clone()
    layer.keys[:, :, 80] = torch.inf
    with pytest.raises(ValueError, match="no codes stand for such"):
        cache.layers[0].store  # noqa: B018
    assert layer.get_seq_length() == TOKENS
    assert (layer.keys - keys).abs().max() < 0.1
    assert (layer.values - values).abs().max() < 0.1
    next_logits(cache)


def test_an_empty_layer_takes_states_and_nothing_else():
    cache, shape = DynamicHybridCache(CONFIG), (1, 2, 70, 16)
    for wrong in (None, [1], torch.zeros(3)):
        with pytest.raises(ValueError, match="takes keys and values"):
            cache.layers[0].keys = wrong
    for layer in cache.layers:
        layer.keys, layer.values = torch.ones(shape), torch.zeros(shape)
    assert cache.get_seq_length() == 70
    assert torch.equal(cache.layers[3].values, torch.zeros(shape))
    next_logits(cache)


@pytest.mark.skipif(group_of_one() is None, reason="this torch has no gloo")
def test_edit_of_a_shared_layer_then_is_refused_with_the_way_out():
    cache = filled(lambda config: DynamicHybridCache(config, group=group_of_one()))
    cache.layers[0].values[:, :, -1] = 0
    with pytest.raises(RuntimeError, match="load it with group="):
        next_logits(cache)
