"""Layers with windows: new tokens see the last ones, whatever came before, in memory that is bounded."""

import copy
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from contracts.generation import Variant
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import DynamicHybridCache, HybridCache, NoCheckpointError, Placement
from hf_hybrid_cache.attention.handles import KVHandle

from common.modes import MODES
from common.soak import count, search_at_random
from models.tiny_models import COMMON, gemma3, gemma4_shared, random_model

WINDOWS = [2, 16, 63, 64, 65, 200]
KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "gemma2": lambda window: Gemma2Config(**COMMON, num_hidden_layers=2, sliding_window=window, layer_types=KINDS),
    "gemma3": lambda window: with_window(gemma3(), window),
    "gemma4_shared": lambda window: with_window(gemma4_shared(), window),
    "gpt_oss": lambda window: GptOssConfig(
        **COMMON, num_hidden_layers=2, sliding_window=window, layer_types=KINDS, num_local_experts=4
    ),
    "llama4_chunks": lambda window: Llama4TextConfig(
        **COMMON, num_hidden_layers=2, attention_chunk_size=window, num_local_experts=2, intermediate_size_mlp=96
    ),
    "mistral": lambda window: MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=window),
    "phi3": lambda window: Phi3Config(**COMMON, num_hidden_layers=2, sliding_window=window),
}
Pair = tuple[torch.Tensor, torch.Tensor]


def with_window(config: PreTrainedConfig, window: int) -> PreTrainedConfig:
    config.sliding_window = window
    return config


def one_layer(window: int) -> PreTrainedConfig:
    return MistralConfig(**COMMON, num_hidden_layers=1, sliding_window=window)


def new_states(batch: int, tokens: int, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, tokens, 16, generator=generator) for _ in range(2))
    return keys, values


class History:
    """A layer with a window, and all states that it has had, of which new tokens see the last ones."""

    def __init__(self, window: int, cpu_decode: bool):
        self.window, self.cache = window, DynamicHybridCache(one_layer(window), cpu_decode=cpu_decode)
        self.all, self.kept_since = new_states(1, 0), 0

    @property
    def num_tokens(self) -> int:
        return self.all[0].shape[2]

    def add(self, tokens: int, seed: int) -> None:
        """Add tokens, and compare attention of all of them with float64 attention over all states."""
        states = new_states(len(self.all[0]), tokens, seed)
        length, offset = self.cache.layers[0].get_mask_sizes(tokens)
        keys, values = self.cache.update(*states, 0)
        self.all = tuple(torch.cat(pair, 2) for pair in zip(self.all, states, strict=True))
        total = self.num_tokens
        assert keys.shape == (*self.all[0].shape[:2], length, 16)
        assert (offset + length, offset) == (total, max(0, total - tokens - self.window + 1))
        at, of = torch.arange(total - tokens, total)[:, None], torch.arange(total)
        mask = (of <= at) & (of > at - self.window)
        query = torch.randn(len(keys), 4, tokens, 16, generator=torch.Generator().manual_seed(seed))
        ours = scaled_dot_product_attention(query, keys, values, mask[None, None, :, offset:], enable_gqa=True)
        wide = [each.double() for each in (query, *self.all)]
        torch.testing.assert_close(ours, scaled_dot_product_attention(*wide, mask, enable_gqa=True).float())
        if tokens == 1:
            bare = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            torch.testing.assert_close(bare, ours)

    def select(self, indices: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(indices))
        self.all = tuple(each[indices] for each in self.all)

    def crop(self, tokens: int) -> None:
        self.cache.crop(-tokens)
        self.all = tuple(each[:, :, : self.num_tokens - tokens] for each in self.all)

    def require_same(self) -> None:
        layer = self.cache.layers[0]
        assert layer.get_seq_length() == self.num_tokens
        if self.num_tokens:
            last = [each[:, :, max(0, self.num_tokens - self.window + 1) :] for each in self.all]
            assert all(torch.equal(*pair) for pair in zip((layer.keys, layer.values), last, strict=True))


@pytest.mark.parametrize("cpu_decode", [True, False])
@search_at_random(30)
@given(data=st.data())
def test_attention_when_history_is_random_then_is_that_over_all_states(cpu_decode: bool, data: st.DataObject):
    history = History(data.draw(st.sampled_from(WINDOWS)), cpu_decode)
    for seed in range(data.draw(st.integers(1, 12))):
        cache, held = history.cache, history.num_tokens
        change = data.draw(st.sampled_from(["add", "remove", "select", "copy", "back", "move", "edit", "record"]))
        if change == "remove" and held:
            tokens = data.draw(st.integers(1, min(held, 64)))
            if cache.layers[0].can_go_back_to(held - tokens):
                history.crop(tokens)
            else:
                with pytest.raises(NoCheckpointError):
                    cache.crop(-tokens)
        elif change == "select" and held:
            sequences = st.integers(0, len(history.all[0]) - 1)
            history.select(data.draw(st.lists(sequences, min_size=1, max_size=3)))
        elif change == "copy":
            history.cache = copy.deepcopy(cache)
        elif change == "back" and held:
            cache.checkpoint()
            before = history.all
            history.add(data.draw(st.sampled_from([1, 70, 300])), seed)
            cache.go_back(held)
            history.all = before
        elif change == "move":
            cache.to(torch.float64)
            cache.to(torch.float32)
        elif change == "edit" and held:
            cache.layers[0].set(cache.layers[0].keys * 2, cache.layers[0].values)
            seen = max(0, held - history.window + 1)
            history.all = torch.cat([history.all[0][:, :, :seen], history.all[0][:, :, seen:] * 2], 2), history.all[1]
        elif change == "record":
            cache.activate_past_recording()
            before = history.num_tokens
            for more in range(3):
                history.add(data.draw(st.sampled_from([1, 16, 70])), seed + more)
            history.crop(data.draw(st.integers(0, history.num_tokens - before)))
            cache.layers[0].record_past = False
        history.require_same()
        for step in range(data.draw(st.integers(1, 3))):
            history.add(data.draw(st.sampled_from([1, 1, 2, 16, 17, 63, 64, 65, 300])), seed + step)
        history.require_same()
        count("windows compared")


@pytest.mark.parametrize("window", WINDOWS)
def test_memory_when_many_windows_have_passed_is_that_after_the_first(window: int):
    cache, sizes = DynamicHybridCache(one_layer(window)), []
    for step in range(10 * window + 400):
        keys, _ = cache.update(*new_states(1, 1, step), 0)
        assert isinstance(keys, KVHandle)
        sizes.append(cache.memory().host_bytes)
    assert sizes[-1] == sizes[window + 150]
    assert sizes[-1] <= (window + max(64, window // 8) + 128) * 2 * 2 * 16 * 4


@pytest.mark.parametrize("window", [16, 200])
def test_crop_when_tokens_were_given_back_is_refused_with_numbers(window: int):
    cache = DynamicHybridCache(one_layer(window))
    for step in range(5):
        cache.update(*new_states(1, 150, step), 0)
    cache.crop(-64)
    layer = cache.layers[0]
    with pytest.raises(NoCheckpointError, match=r"cannot go back by 300 tokens to 386: .* It can go back by \d+\."):
        layer.crop(-300)
    with pytest.raises(NoCheckpointError, match="WindowLayer no longer hold"):
        cache.crop(-300)
    assert layer.get_seq_length() == 686
    cache.crop(-1000)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("window", [16, 65])
def test_a_file_when_windows_were_given_back_has_what_transformers_has(window: int, tmp_path: Path):
    config = one_layer(window)
    cache, stock = DynamicHybridCache(config), DynamicCache(config=config)
    for step in range(4):
        for each in (cache, stock):
            each.update(*new_states(2, 70, step), 0)
    cache.save(tmp_path / "saved.kv")
    loaded = HybridCache.load(tmp_path / "saved.kv", config, placement=Placement(cpu_decode=False))
    assert loaded.get_seq_length() == stock.get_seq_length() == 280
    assert torch.equal(loaded.layers[0].keys, stock.layers[0].keys)
    ours, theirs = (each.update(*new_states(2, 5), 0) for each in (loaded, stock))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_states_of_another_number_of_tokens_are_refused():
    layer = DynamicHybridCache(one_layer(16)).layers[0]
    layer.update(*new_states(1, 40))
    with pytest.raises(ValueError, match=r"40 tokens and a window of 16, so it takes the states of the last 15, got 7"):
        layer.set(*new_states(1, 7))
    layer.set(*new_states(1, 15, seed=1))
    assert torch.equal(layer.keys, new_states(1, 15, seed=1)[0])


@pytest.mark.default("pairs")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [16, 63, 64, 65, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_windows_of_any_size_equal_those_of_dynamic_cache(family: str, window: int, mode: str):
    model = random_model(FAMILIES[family](window))
    Variant(DynamicHybridCache, tolerance=1e-3, more=152, is_remembered=False).require(model, mode)
