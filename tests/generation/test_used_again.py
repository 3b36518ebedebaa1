"""A cache that holds tokens is asked again: what does not continue them is refused before anything changes."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import (
    EncoderDecoderCache,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache

from hf_hybrid_cache import (
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    IncompleteCacheError,
    OffloadedHybridCache,
    QuantizedHybridCache,
)
from hf_hybrid_cache.cache_argument import cache_argument

from common.modes import answer, read
from models.tiny_models import COMMON, llama, random_model, random_prompt, tiny_model

CONFIG = llama()
HELD = 100
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "sampling": {"do_sample": True},
    "chunks": {"prefill_chunk_size": 16},
    "DecodeOnCPU": {"custom_generate": DecodeOnCPU()},
}


def used(make: Callable[[PreTrainedConfig], HybridCache] = DynamicHybridCache) -> HybridCache:
    """A cache that holds 100 tokens, by way of `generate`."""
    cache = make(CONFIG)
    answer(tiny_model("llama"), random_prompt(1, HELD - 5), cache, max_new_tokens=6)
    assert cache.get_seq_length() == HELD
    return cache


@pytest.mark.parametrize("way", WAYS)
def test_used_cache_when_asked_a_shorter_prompt_then_refuses(way: str):
    model, cache, options = tiny_model("llama"), used(QuantizedHybridCache), {"max_new_tokens": 3} | WAYS[way]
    keys = [layer.keys for layer in cache.layers]
    for tokens in (1, 50, 59, 100):
        prompt = random_prompt(1, tokens, seed=3)
        with pytest.raises(ValueError, match=r"not longer than the 100 tokens.*whole conversation.*new cache"):
            answer(model, prompt, cache, **options)
        embeds = model.get_input_embeddings()(prompt)
        with pytest.raises(ValueError, match=rf"the prompt of {tokens} tokens is not longer"):
            model.generate(inputs_embeds=embeds, **cache_argument(cache), **options)
    if way == "greedy":  # transformers would put the whole prompt into it again, also where it is longer
        with pytest.raises(ValueError, match=r"the cache holds 100 tokens already.*custom_generate=PromptLookup\(\)"):
            answer(model, random_prompt(1, 120), cache, prompt_lookup_num_tokens=3)
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys, strict=True))


@pytest.mark.parametrize("is_of_the_call", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_cache_when_generate_is_told_not_to_use_it_then_refuses(
    way: str, is_of_the_call: bool, monkeypatch: pytest.MonkeyPatch
):
    model, prompt, options = tiny_model("llama"), random_prompt(1, 120), {"max_new_tokens": 3} | WAYS[way]
    caches = DynamicHybridCache(CONFIG), used(QuantizedHybridCache)
    if is_of_the_call:
        options |= {"use_cache": False}
    else:
        monkeypatch.setattr(model.generation_config, "use_cache", False)
    for cache in caches:
        held = cache.get_seq_length()
        with pytest.raises(ValueError, match=r"use_cache=False forbids it.*Pass use_cache=True to generate"):
            answer(model, prompt, cache, **options)
        assert cache.get_seq_length() == held


def with_two_of_four_layers() -> PreTrainedModel:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers = model.model.layers[:2]
    return model


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache])
def test_models_with_fewer_layers_than_their_config_then_answer_as_stock(tmp_path, make: Callable):
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "decoder_start_token_id": 0}
    config = T5Config(**sizes, num_layers=4, num_decoder_layers=2)
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(config).eval()
    caches = (EncoderDecoderCache(each, DynamicCache(config=config)) for each in (make(config), DynamicCache()))
    assert torch.equal(*(answer(t5, random_prompt(1, 20), each) for each in caches))
    model, cache, stock = with_two_of_four_layers(), make(CONFIG), DynamicCache(config=CONFIG)
    text = random_prompt(1, 90)
    for _ in range(2):
        ours, theirs = (answer(model, text, each) for each in (cache, stock))
        assert torch.equal(ours, theirs)
        text = torch.cat([ours, random_prompt(1, 10, seed=4)], dim=1)
    cache.drop_unfinished()
    assert cache.get_seq_length() == stock.get_seq_length()
    cache.save(tmp_path / "two_layers.kv")
    assert HybridCache.load(tmp_path / "two_layers.kv", CONFIG).get_seq_length() == stock.get_seq_length()


def test_first_pass_that_was_ended_half_way_then_is_never_continued(tmp_path):
    """A single pass that ended early is taken for that of a smaller model until another one goes farther."""
    cache, whole, prompt = DynamicHybridCache(CONFIG), tiny_model("llama"), random_prompt(1, 90)
    read(with_two_of_four_layers(), prompt, cache)
    for use in (lambda: cache.save(tmp_path / "unfinished.kv"), lambda: answer(whole, prompt, cache)):
        with pytest.raises(IncompleteCacheError, match="The last layers hold nothing"):
            use()
    for _ in range(2):
        with pytest.raises(IncompleteCacheError, match="layer 2 holds nothing"):
            read(whole, prompt[:, :5], cache)
    cache.drop_unfinished()
    assert cache.get_seq_length() == 0
    assert torch.equal(answer(whole, prompt, cache), answer(whole, prompt, DynamicCache(config=CONFIG)))


BORDER = 32


@pytest.fixture(scope="module")
def phi3() -> PreTrainedModel:
    """Make a model whose rotary embedding is another one beyond 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    common = COMMON | {"max_position_embeddings": 256}
    config = Phi3Config(
        **common,
        num_hidden_layers=2,
        original_max_position_embeddings=BORDER,
        rope_parameters=rope | {"original_max_position_embeddings": BORDER},
    )
    return random_model(config)


@pytest.mark.parametrize(("tokens", "left_at"), [(10, None), (BORDER, 32), (BORDER + 1, 0)])
def test_model_that_leaves_the_cache_at_a_border_then_says_so_once(phi3, tokens: int, left_at: int | None):
    # Without kernels: Numba changes the filters of warnings while it compiles in the background.
    cache, stock = DynamicHybridCache(phi3.config, cpu_decode=False), DynamicCache(config=phi3.config)
    prompt = random_prompt(1, tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = answer(phi3, prompt, cache, max_new_tokens=10)
    assert torch.equal(output, answer(phi3, prompt, stock, max_new_tokens=10))
    said = [str(each.message) for each in caught if "goes on without this cache" in str(each.message)]
    assert len(said) == (left_at is not None)
    assert cache.get_seq_length() == stock.get_seq_length() == (tokens + 9 if left_at is None else left_at)
    if said:
        assert "beyond 32 tokens" in said[0]
        with pytest.warns(UserWarning, match="has not used the cache"):
            DynamicHybridCache(CONFIG).note_tokens(prompt)
    else:  # filled beyond the border in one call it is used
        longer = torch.cat([prompt, random_prompt(1, 50)], dim=1)
        for each in (cache, stock):
            each.reset()
            read(phi3, longer[:, :-1], each)
        outputs = [answer(phi3, longer, each, max_new_tokens=10) for each in (cache, stock)]
        assert cache.get_seq_length() == 69
        assert torch.equal(*outputs)
