"""Caches of which attention reads a part: `selection=`."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HybridCache,
    Placement,
    QuantizedHybridCache,
    Selection,
    minmax,
)
from hf_hybrid_cache.attention import layer_selection

from caches import group_of_one
from tiny_models import llama, random_prompt, tiny_model

CONTEXT = 1000


def clustered_states(config: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of which few lie in the direction of `query`, and values."""
    torch.manual_seed(0)
    shape = (1, config.num_key_value_heads, num_tokens, config.head_dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    keys[:, :, 400:410] += 4 * direction(config)
    return keys, values


def direction(config: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(config.num_key_value_heads, 1, config.head_dim)


def attend(cache: HybridCache, config: Any, times: int = 1, layer: int = 0) -> torch.Tensor:
    """What a query that looks for those keys gets, a new token each time."""
    group = config.num_attention_heads // config.num_key_value_heads
    query = (3 * direction(config)).repeat_interleave(group, dim=0)[None]
    for _ in range(times):
        new = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)
        keys, values = cache.update(new, new, layer)
        result = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    return result


def filled(cache: HybridCache, config: Any, layers: int = 1) -> HybridCache:
    for layer in range(layers):
        cache.update(*clustered_states(config, CONTEXT), layer)
    return cache


def few_bits(config: Any, **options: Any) -> QuantizedHybridCache:
    return QuantizedHybridCache(config, bits=4, rotate=True, **options)


def test_little_is_read_where_few_tokens_matter_and_the_result_is_nearly_the_same():
    config = llama()
    everything = attend(filled(few_bits(config), config), config)
    cache = filled(few_bits(config, selection=Selection(mass=0.99)), config)
    result = attend(cache, config)
    assert cache.stats.share_read[0] < 0.4  # of which most are the first tokens and those not coded yet
    torch.testing.assert_close(result, everything, rtol=0, atol=0.05)


def test_all_is_read_to_the_last_bit_with_a_mass_of_one_and_in_dense_layers():
    config = llama()
    everything = attend(filled(few_bits(config), config), config, 20)
    for each in (Selection(mass=1), Selection(mass=0.5, dense_layers=[0])):
        cache = filled(few_bits(config, selection=each), config)
        assert torch.equal(attend(cache, config, 20), everything)
        assert cache.stats.share_read == {0: 1.0}


def test_where_much_has_to_be_read_all_is_for_some_steps(monkeypatch: pytest.MonkeyPatch):
    config = llama()
    cache = filled(few_bits(config, selection=Selection(mass=0.99)), config)
    layer = cache.layers[0]._selection
    monkeypatch.setattr(layer, "most", 1e-9)
    everything = attend(filled(few_bits(config), config), config)
    assert torch.equal(attend(cache, config), everything)
    monkeypatch.undo()
    for step in range(1, 2 * layer_selection._STEPS_BETWEEN):
        before, held = cache.stats.tokens_read[0], cache.stats.tokens_held[0]
        attend(cache, config)
        has_read_all = cache.stats.tokens_read[0] - before == cache.stats.tokens_held[0] - held
        assert has_read_all == (step < layer_selection._STEPS_BETWEEN)


def test_many_queries_at_once_read_all():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(mass=0.5)), config)
    new = torch.randn(1, config.num_key_value_heads, layer_selection._MOST_ROWS + 1, config.head_dim)
    keys, values = cache.update(new, new, 0)
    query = torch.randn(1, config.num_attention_heads, new.shape[2], config.head_dim)
    scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    assert cache.stats.share_read in ({}, {0: 1.0})


def test_layers_are_counted_by_themselves_and_reset_forgets():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(mass=0.9, dense_layers={1})), config, layers=2)
    attend(cache, config, 3)
    attend(cache, config, 3, layer=1)
    assert cache.stats.share_read[0] < cache.stats.share_read[1] == 1.0
    assert cache.stats.tokens_held[0] == cache.stats.tokens_held[1]
    cache.reset()
    assert cache.stats.share_read == {}
    assert cache.stats.tokens_held == {}


def test_a_copy_chooses_and_counts_by_itself():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(mass=0.9)), config)
    twin = copy.deepcopy(cache)
    attend(cache, config)
    assert twin.stats.share_read == {}
    assert twin.selection == cache.selection
    attend(twin, config)
    assert twin.stats.share_read == cache.stats.share_read


@pytest.mark.parametrize("mmap", [False, True])
def test_a_cache_from_a_file_can_be_read_in_part(tmp_path: Path, mmap: bool):
    config = llama()
    cache = filled(few_bits(config, selection=Selection(mass=0.9)), config, config.num_hidden_layers)
    expected = attend(copy.deepcopy(cache), config)
    cache.save(tmp_path / "cache.kv")
    assert HybridCache.load(tmp_path / "cache.kv", config).selection is None
    loaded = HybridCache.load(tmp_path / "cache.kv", config, mmap=mmap, selection=Selection(mass=0.9))
    assert torch.equal(attend(loaded, config), expected)
    assert loaded.stats.share_read[0] < 0.4


def test_a_file_that_nothing_can_be_chosen_of_is_named(tmp_path: Path):
    config = llama()
    filled(DynamicHybridCache(config), config, config.num_hidden_layers).save(tmp_path / "cache.kv")
    with pytest.raises(CacheFileError, match=r"no layer is coded.*Leave out selection=\."):
        HybridCache.load(tmp_path / "cache.kv", config, selection=Selection())


def test_after_a_reset_a_cache_chooses_as_a_new_one():
    config = llama()
    cache = few_bits(config, selection=Selection(mass=0.9))
    results = []
    for sharp in (False, True, True):
        filled(cache, config)
        if not sharp:  # all matters, so that the next steps would read all
            keys, values = cache.update(*[torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)] * 2, 0)
            query = torch.zeros(1, config.num_attention_heads, 1, config.head_dim)
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            assert cache.stats.share_read == {0: 1.0}
        else:
            results.append(attend(cache, config))
            assert cache.stats.share_read[0] < 0.4
        cache.reset()
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}])
def test_generate_reads_a_part(options: dict[str, Any]):
    model = tiny_model("llama")
    cache = few_bits(model.config, selection=Selection(mass=0.8))
    prompt = random_prompt(1, 400)
    model.generate(prompt, past_key_values=cache, max_new_tokens=40, min_new_tokens=40, **options)
    assert set(cache.stats.share_read) == set(range(model.config.num_hidden_layers))
    assert all(share <= 1 for share in cache.stats.share_read.values())


@pytest.mark.parametrize("name", ["mass", "most"])
@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), "much", True])
def test_what_is_no_share_is_refused(name: str, share: Any):
    with pytest.raises(
        ValueError, match=f"{name} must be a number above 0 and at most 1.* got {re.escape(repr(share))}"
    ):
        Selection(**{name: share})


@pytest.mark.parametrize("layers", [3, ["first"], [-1], [True]])
def test_dense_layers_that_are_no_indices_are_refused(layers: Any):
    with pytest.raises(ValueError, match="dense_layers must be a collection of indices of layers"):
        Selection(dense_layers=layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": minmax(4), "selection": 0.99}, "selection must be a Selection such as"),
        ({"codec": minmax(4), "placement": Placement(cpu_decode=False)}, "leave out cpu_decode=False"),
        ({}, "no layer is coded: use QuantizedHybridCache"),
        ({"codec": minmax(4), "selection": Selection(dense_layers=[99])}, r"selection names layers \[99\]"),
    ],
)
def test_a_selection_that_nothing_can_come_of_is_refused(arguments: dict[str, Any], message: str):
    kind = TypeError if arguments.get("selection") == 0.99 else ValueError
    with pytest.raises(kind, match=message):
        HybridCache(llama(), **{"selection": Selection(), **arguments})


def test_processes_that_share_a_context_read_all():
    group = group_of_one()
    if group is None:
        pytest.skip("this torch has no process groups")
    with pytest.raises(ValueError, match="selection= and group= cannot be used together"):
        few_bits(llama(), group=group, selection=Selection())


def test_without_a_selection_nothing_is_counted():
    config = llama()
    cache = filled(few_bits(config), config)
    attend(cache, config)
    assert cache.stats.share_read == {}
    assert cache.selection is None
    assert isinstance(cache, DynamicCache)
    assert DynamicHybridCache(config).selection is None
