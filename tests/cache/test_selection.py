"""Caches with top-p page selection: `selection=`."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    CacheFileError,
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    OffloadedHybridCache,
    Placement,
    Selection,
    minmax,
)
from hf_hybrid_cache.attention import selection as selection_module
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels import index_bytes
from hf_hybrid_cache.storage import grown_capacity
from hf_hybrid_cache.storage.memory import host_memory
from hf_hybrid_cache.storage.memory.host_memory import tightest_limit

from common.caches import group_of_one
from models.tiny_models import llama, random_prompt, tiny_model

CONTEXT = 1000


def clustered_states(config: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make keys of which few lie in the direction of `query`, and values."""
    torch.manual_seed(0)
    shape = (1, config.num_key_value_heads, num_tokens, config.head_dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    keys[:, :, 400:410] += 4 * direction(config)
    return keys, values


def direction(config: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(config.num_key_value_heads, 1, config.head_dim)


def looking(config: Any) -> torch.Tensor:
    """Make queries in the direction of those keys."""
    group = config.num_attention_heads // config.num_key_value_heads
    return (3 * direction(config)).repeat_interleave(group, dim=0)[None]


def attend(cache: HybridCache, config: Any, times: int = 1, layer: int = 0) -> torch.Tensor:
    """Attend with a query in the direction of those keys, with a new token each time."""
    query = looking(config)
    for _ in range(times):
        new = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)
        keys, values = cache.update(new, new, layer)
        result = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    return result


def filled(cache: HybridCache, config: Any, layers: int = 1) -> HybridCache:
    for layer in range(layers):
        cache.update(*clustered_states(config, CONTEXT), layer)
    return cache


def few_bits(config: Any, **options: Any) -> HybridCache:
    return HybridCache(config, codec=minmax(4, rotate=True), **options)


Maker = Callable[..., HybridCache]
EVERY_CACHE = pytest.mark.parametrize("make", [few_bits, DynamicHybridCache, OffloadedHybridCache])


@EVERY_CACHE
def test_selection_when_few_tokens_matter_then_reads_little(make: Maker):
    config = llama()
    everything = attend(filled(make(config), config), config)
    cache = filled(make(config, selection=Selection(top_p=0.99)), config)
    result = attend(cache, config)
    assert cache.stats.share_read[0] < 0.4  # most of these are the first tokens, and those not quantized yet
    torch.testing.assert_close(result, everything, rtol=0, atol=0.05)


def test_selection_when_top_p_is_1_or_layer_is_dense_then_reads_all():
    config = llama()
    everything = attend(filled(few_bits(config), config), config, 20)
    for each in (Selection(top_p=1), Selection(top_p=0.5, dense_layers=[0])):
        cache = filled(few_bits(config, selection=each), config)
        assert torch.equal(attend(cache, config, 20), everything)
        assert cache.stats.share_read == {0: 1.0}


@EVERY_CACHE
def test_what_comes_in_place_of_what_was_removed_is_found(make: Maker):
    config = llama()
    results = []
    for selection in (None, Selection(top_p=0.99)):
        cache = filled(make(config, selection=selection), config)
        results.append([attend(cache, config)])
        keys, values = (states[:, :, 300:700] for states in clustered_states(config, CONTEXT))
        for kept in (500, 407):  # in a block, and among the tokens that matter
            layer = cache.layers[0]
            layer.crop(kept - layer.get_seq_length())
            layer.update(keys, -values)  # the keys that matter come again, with other values
            results[-1].append(attend(cache, config))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert cache.stats.share_read[0] < 0.5


@EVERY_CACHE
def test_sequences_that_are_repeated_selected_and_reordered_are_found(make: Maker):
    config = llama()
    cache = filled(make(config, selection=Selection(top_p=0.9)), config)
    query = looking(config)

    def step(batch: int) -> torch.Tensor:
        new = torch.zeros(batch, config.num_key_value_heads, 1, config.head_dim)
        keys, values = cache.update(new, new, 0)
        return scaled_dot_product_attention(query.expand(batch, -1, -1, -1), keys, values, enable_gqa=True)

    alone = step(1)
    before = cache.stats.tokens_read[0]
    cache.batch_repeat_interleave(3)
    for indices in ([2, 0, 1], [0, 1, 2]):
        cache.reorder_cache(torch.tensor(indices))
        torch.testing.assert_close(step(3), alone.expand(3, -1, -1, -1), rtol=0, atol=1e-2)
    cache.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(step(1), alone, rtol=0, atol=1e-2)
    assert cache.stats.tokens_read[0] < 9 * before


@EVERY_CACHE
def test_sequences_of_a_batch_keep_what_is_theirs(make: Maker):
    config = llama()
    torch.manual_seed(3)
    keys, values = (torch.randn(2, config.num_key_value_heads, CONTEXT, config.head_dim) for _ in range(2))
    for sequence, place in enumerate((300, 600)):
        keys[sequence, :, place : place + 10] += 4 * direction(config)
    query = looking(config).expand(2, -1, -1, -1)

    def run(selection: Selection | None) -> list[torch.Tensor]:
        cache = make(config, selection=selection)
        cache.update(keys, values, 0)
        results = []
        for indices in ([0, 1], [1, 0], [1, 1]):
            cache.reorder_cache(torch.tensor(indices))
            new = torch.zeros(2, config.num_key_value_heads, 1, config.head_dim)
            results.append(scaled_dot_product_attention(query, *cache.update(new, new, 0), enable_gqa=True))
        return results

    for found, expected in zip(run(Selection(top_p=0.99)), run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@EVERY_CACHE
def test_the_index_is_counted_and_given_back(make: Maker):
    config = llama()
    plain, cache = (make(config, selection=each) for each in (None, Selection(top_p=0.9)))
    for each in (plain, cache):
        attend(filled(each, config), config)
    heads, blocks = config.num_key_value_heads, (CONTEXT - 64 - 64) // 64
    assert cache.memory().host_bytes - plain.memory().host_bytes == blocks * heads * index_bytes(config.head_dim)
    cache.reset()
    assert cache.memory().host_bytes == 0


@EVERY_CACHE
def test_an_index_that_does_not_fit_the_host_is_refused_with_a_number(make: Maker, monkeypatch: pytest.MonkeyPatch):
    config = llama()
    cache = filled(make(config, selection=Selection(top_p=0.9)), config)
    cache.layers[0].store.wait_for_copies()
    limit = tightest_limit()
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: limit._replace(free=1000))
    with pytest.raises(HostMemoryError, match=r"need 0\.00 GiB more host memory and 0\.00 GiB are free"):
        attend(cache, config)
    monkeypatch.undo()
    assert torch.isfinite(attend(cache, config)).all()
    assert cache.stats.share_read[0] < 0.5


@pytest.mark.parametrize("is_used_again", [False, True])
def test_the_first_layer_asks_for_the_indices_of_all_layers(is_used_again: bool, monkeypatch: pytest.MonkeyPatch):
    config = llama()
    cache = DynamicHybridCache(config, selection=Selection(top_p=0.9))
    if is_used_again:
        attend(filled(cache, config, config.num_hidden_layers), config)
        attend(cache, config, layer=config.num_hidden_layers - 1)
        cache.reset()
    filled(cache, config, config.num_hidden_layers)
    blocks = (CONTEXT + 1 - 64) // 64 - 1
    of_layer = grown_capacity(blocks, 64) * config.num_key_value_heads * index_bytes(config.head_dim)
    limit = tightest_limit()
    monkeypatch.setattr(host_memory, "tightest_limit", lambda: limit._replace(free=2 * of_layer))
    with pytest.raises(HostMemoryError):
        attend(cache, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_that_is_moved_to_another_type_chooses_still(dtype: torch.dtype):
    config = llama()
    cache = filled(DynamicHybridCache(config, selection=Selection(top_p=0.9)), config)
    attend(cache, config)
    cache.layers[0].to(torch.device("cpu"), dtype)
    query = looking(config).to(dtype)
    new = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim, dtype=dtype)
    before, held = cache.stats.tokens_read[0], cache.stats.tokens_held[0]
    found = scaled_dot_product_attention(query, *cache.update(new, new, 0), enable_gqa=True)
    expected = attend(filled(DynamicHybridCache(config), config), config)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.1)
    assert cache.stats.tokens_read[0] - before < 0.5 * (cache.stats.tokens_held[0] - held)


def test_where_much_has_to_be_read_all_is_for_some_steps(monkeypatch: pytest.MonkeyPatch):
    config = llama()
    cache = filled(few_bits(config, selection=Selection(top_p=0.99)), config)
    layer = cache.layers[0]._selection
    monkeypatch.setattr(layer, "most", 1e-9)
    everything = attend(filled(few_bits(config), config), config)
    assert torch.equal(attend(cache, config), everything)
    monkeypatch.undo()
    for step in range(1, 2 * selection_module._STEPS_BETWEEN):
        before, held = cache.stats.tokens_read[0], cache.stats.tokens_held[0]
        attend(cache, config)
        has_read_all = cache.stats.tokens_read[0] - before == cache.stats.tokens_held[0] - held
        assert has_read_all == (step < selection_module._STEPS_BETWEEN)


def test_selection_when_many_queries_attend_then_reads_all():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(top_p=0.5)), config)
    new = torch.randn(1, config.num_key_value_heads, selection_module._MOST_ROWS + 1, config.head_dim)
    keys, values = cache.update(new, new, 0)
    query = torch.randn(1, config.num_attention_heads, new.shape[2], config.head_dim)
    scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    assert cache.stats.share_read in ({}, {0: 1.0})


def test_share_read_when_reset_then_forgets_each_layers_count():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(top_p=0.9, dense_layers={1})), config, layers=2)
    attend(cache, config, 3)
    attend(cache, config, 3, layer=1)
    assert cache.stats.share_read[0] < cache.stats.share_read[1] == 1.0
    assert cache.stats.tokens_held[0] == cache.stats.tokens_held[1]
    cache.reset()
    assert cache.stats.share_read == {}
    assert cache.stats.tokens_held == {}


def test_a_copy_chooses_and_counts_by_itself():
    config = llama()
    cache = filled(few_bits(config, selection=Selection(top_p=0.9)), config)
    twin = copy.deepcopy(cache)
    attend(cache, config)
    assert twin.stats.share_read == {}
    assert twin.selection == cache.selection
    attend(twin, config)
    assert twin.stats.share_read == cache.stats.share_read


@EVERY_CACHE
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_a_cache_from_a_file_can_be_read_in_part(
    tmp_path: Path, make: Maker, mmap: bool, has_index: bool, monkeypatch: pytest.MonkeyPatch
):
    config, path = llama(), tmp_path / "cache.kv"
    cache = filled(make(config, selection=Selection(top_p=0.9)), config, config.num_hidden_layers)
    expected = [attend(each, config) for each in (copy.deepcopy(cache), filled(make(config), config))]
    (cache if has_index else filled(make(config), config, config.num_hidden_layers)).save(path)
    assert HybridCache.load(path, config).selection is None
    placement = Placement(cpu_decode=True)
    torch.testing.assert_close(attend(HybridCache.load(path, config, placement), config), expected[1])
    if has_index:  # and nothing is to be made
        monkeypatch.setattr(selection_module, "quantize_index", None)
    loaded = HybridCache.load(path, config, placement, mmap=mmap, selection=Selection(top_p=0.9))
    assert torch.equal(attend(loaded, config), expected[0])
    assert loaded.stats.share_read[0] < 0.4
    monkeypatch.undo()
    for each in (loaded, cache):
        each.layers[0].update(*clustered_states(config, 300))
    torch.testing.assert_close(attend(loaded, config), attend(cache, config))


@pytest.mark.parametrize("mmap", [False, True])
def test_an_index_that_was_altered_in_a_file_is_told(tmp_path: Path, mmap: bool):
    config, path = llama(), tmp_path / "cache.kv"
    filled(DynamicHybridCache(config, selection=Selection()), config, config.num_hidden_layers).save(path)
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1  # indices come last, before the checksum of the header
    path.write_bytes(data)
    with pytest.raises(CacheFileError, match=r"index\.\d does not fit its checksum"):
        HybridCache.load(path, config, mmap=mmap, selection=Selection())


def test_a_file_when_attention_chooses_has_an_index_and_else_none(tmp_path: Path):
    config, path = llama(), tmp_path / "cache.kv"
    have_index = []
    for selection in (None, Selection(top_p=1), Selection()):
        filled(DynamicHybridCache(config, selection=selection), config, config.num_hidden_layers).save(path)
        have_index.append(b'"index.0/' in path.read_bytes()[:100_000])
    assert have_index == [False, False, True]


def test_after_a_reset_a_cache_chooses_as_a_new_one():
    config = llama()
    cache = few_bits(config, selection=Selection(top_p=0.9))
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


@EVERY_CACHE
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}])
def test_selection_when_generating_then_reads_a_part(make: Maker, options: dict[str, Any]):
    model = tiny_model("llama")
    cache = make(model.config, selection=Selection(top_p=0.8))
    prompt = random_prompt(1, 400)
    model.generate(prompt, **cache_argument(cache), max_new_tokens=40, min_new_tokens=40, **options)
    assert set(cache.stats.share_read) == set(range(model.config.num_hidden_layers))
    assert all(share <= 1 for share in cache.stats.share_read.values())


@pytest.mark.parametrize("name", ["top_p", "most"])
@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), "much", True])
def test_selection_when_top_p_is_no_share_then_is_refused(name: str, share: Any):
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
        ({"codec": minmax(4), "selection": Selection(dense_layers=[99])}, r"selection names layers \[99\]"),
    ],
)
def test_selection_when_it_cannot_apply_then_is_refused(arguments: dict[str, Any], message: str):
    kind = TypeError if arguments.get("selection") == 0.99 else ValueError
    with pytest.raises(kind, match=message):
        HybridCache(llama(), **{"selection": Selection(), **arguments})


def test_processes_that_share_a_context_read_all():
    group = group_of_one()
    if group is None:
        pytest.skip("this torch has no process groups")
    with pytest.raises(ValueError, match="selection= and group= cannot be used together"):
        few_bits(llama(), group=group, selection=Selection())


def test_selection_when_default_with_codes_then_reads_more():
    config = llama()
    for make, top_p in ((few_bits, 0.998), (DynamicHybridCache, 0.995)):
        assert make(config, selection=Selection()).layers[0]._selection.top_p == top_p
        assert make(config, selection=Selection(0.9)).layers[0]._selection.top_p == 0.9


def test_without_a_selection_nothing_is_counted():
    config = llama()
    cache = filled(few_bits(config), config)
    attend(cache, config)
    assert cache.stats.share_read == {}
    assert cache.selection is None
    assert isinstance(cache, DynamicCache)
    assert DynamicHybridCache(config).selection is None
