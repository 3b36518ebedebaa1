"""Messages for users who do something that cannot work, and the `repr` of caches."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_hybrid_cache import (
    CacheFileError,
    DecodeOnCPU,
    DynamicHybridCache,
    HybridCache,
    KVCodec,
    OffloadedHybridCache,
    Placement,
    QuantizedHybridCache,
    cache_for_budget,
    minmax,
)
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from models.tiny_models import random_prompt, tiny_model


@torch.no_grad()
def filled(cache: HybridCache, num_tokens: int = 300, family: str = "llama") -> HybridCache:
    tiny_model(family)(random_prompt(1, num_tokens), **cache_argument(cache))
    return cache


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, HybridCache])
def test_a_cache_that_changes_nothing_says_so_where_it_is_made(make: type[HybridCache]):
    with pytest.warns(
        UserWarning, match="No layer .* sliding window of 16 tokens.* DynamicCache does the same"
    ) as found:
        make(tiny_model("mistral_sliding").config)
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared", "qwen3_next"])
def test_a_cache_that_changes_something_warns_of_nothing(family: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicHybridCache(tiny_model(family).config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"config": LlamaConfig},
            "config must be a transformers config such as model.config, got the class LlamaConfig",
        ),
        ({"config": "llama"}, "got str"),
        (
            {"placement": Placement},
            r"placement must be a Placement such as Placement\(offload=True\).* the class Placement",
        ),
        ({"codec": minmax}, r"codec must be a KVCodec such as minmax\(4\), or None, got function"),
        ({"codec": 4}, "got int"),
        ({"codec": {0: KVCodec}}, "codec must be a KVCodec .* got the class KVCodec"),
        ({"codec": {0: minmax(4), 1: minmax}}, "got function"),
    ],
)
def test_argument_when_of_wrong_type_then_error_names_it(arguments: dict, message: str):
    with pytest.raises(TypeError, match=message):
        HybridCache(**{"config": LlamaConfig(num_hidden_layers=2), **arguments})


@pytest.mark.parametrize(
    "make",
    [
        DynamicHybridCache,
        OffloadedHybridCache,
        QuantizedHybridCache,
        lambda config: QuantizedHybridCache(config, bits={0: 4}),
        lambda config: cache_for_budget(config, 100, gpu_memory=0, host_memory="1GiB"),
        lambda config: HybridCache.load("document.kv", config),
    ],
)
@pytest.mark.parametrize(("config", "given"), [(LlamaConfig, "the class LlamaConfig"), ("llama", "str")])
def test_a_class_for_the_config_is_named(make: Callable[[Any], HybridCache], config: object, given: str):
    with pytest.raises(TypeError, match=f"config must be a transformers config such as model.config, got {given}"):
        make(config)


@pytest.mark.parametrize("cache", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, HybridCache])
def test_a_class_for_a_cache_is_named(cache: type[HybridCache]):
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    message = rf"{CACHE_ARGUMENT} is a class of caches.* {CACHE_ARGUMENT}=DynamicHybridCache\(model\.config\)"
    with pytest.raises(TypeError, match=message):
        model.generate(ids, **cache_argument(cache), max_new_tokens=2)
    with pytest.raises(TypeError, match=message):
        model(ids, **cache_argument(cache))
    with pytest.raises(TypeError, match=rf"Pass {CACHE_ARGUMENT}=DynamicHybridCache\(model\.config\)"):
        model.generate(ids, **cache_argument(cache), max_new_tokens=2, custom_generate=DecodeOnCPU())


def test_a_layer_whose_codec_is_none_stays_in_full_precision():
    cache = HybridCache(tiny_model("llama").config, codec={0: None, 2: minmax(4)})
    assert list(cache.codecs) == [2]


@pytest.mark.parametrize("bits", [4.0, "4", 3, (4, 4.0), True, None])
def test_bits_when_not_integers_then_are_refused(bits: object):
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, or a pair of these"):
        minmax(bits)


def test_a_cache_of_fewer_layers_than_the_model_names_both():
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"has a layer 3 \(counted from 0\), and the cache was made for 3 layers"):
        filled(DynamicHybridCache(config))


@pytest.mark.parametrize("length", [10, 1])  # transformers passes on only the end of a longer prompt
def test_prompt_when_not_longer_than_cache_then_is_refused_with_way_out(length: int):
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    cache = filled(DynamicHybridCache(model.config), 20)
    with pytest.raises(
        ValueError, match=r"not longer than the 20 tokens that the cache holds already.*cache\.reset\(\)"
    ):
        model(ids[:, :0], **cache_argument(cache))
    with pytest.raises(ValueError, match="not longer than the 20 tokens"):
        model.generate(ids[:, :length], **cache_argument(cache), max_new_tokens=2)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_cache_when_pickled_then_error_names_alternatives(copied):
    with pytest.raises(TypeError, match=r"cache\.save\(path\).* copy\.deepcopy\(cache\)"):
        copied(filled(DynamicHybridCache(tiny_model("llama").config)))


def test_a_cache_says_what_it_is_in_one_line():
    config = tiny_model("llama").config
    assert repr(DynamicHybridCache(config)) == "DynamicHybridCache(4 layers in full precision; empty)"
    cache = filled(DynamicHybridCache(config))
    size = f"{cache.memory().host_bytes / 2**20:.1f} MiB in host memory"
    expected = f"DynamicHybridCache(4 layers in full precision, attended to on the CPU; 300 tokens, {size})"
    assert repr(cache) == expected
    assert repr(QuantizedHybridCache(config, bits=(4, 2), offload=True, cpu_decode=False)) == (
        "QuantizedHybridCache(4 layers of 4 and 2 bits, offloaded; empty)"
    )
    assert repr(QuantizedHybridCache(tiny_model("gemma3").config, bits={1: 8})) == (
        "QuantizedHybridCache(1 layer of 8 bits, 1 layer in full precision, 2 of transformers' own; empty)"
    )


def test_cache_when_printed_then_is_unchanged():
    cache = QuantizedHybridCache(tiny_model("llama").config)
    states = torch.randn(1, 2, 300, 16)
    cache.update(states, states, 0)
    size = f"{cache.memory().host_bytes / 2**20:.1f} MiB in host memory"
    assert repr(cache).endswith(f"; 300 tokens, some to be quantized, {size})")
    assert not cache.codecs[0].is_fitted


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    filled(DynamicHybridCache(tiny_model("llama").config)).save(tmp_path / "cache.kv")
    return tmp_path / "cache.kv"


def config_of(dtype: torch.dtype | None) -> LlamaConfig:
    config = copy.deepcopy(tiny_model("llama").config)
    config.dtype = dtype
    return config


def test_a_file_for_a_model_of_fewer_digits_is_refused_with_the_way_out(saved: Path):
    with pytest.raises(
        CacheFileError, match=r"in float32, and the model is in bfloat16: load .*dtype=torch\.float32, or"
    ):
        HybridCache.load(saved, config_of(torch.bfloat16))
    cache = HybridCache.load(saved, config_of(torch.bfloat16), dtype=torch.bfloat16)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    same = HybridCache.load(saved, config_of(torch.bfloat16), dtype=torch.float32)
    assert {layer.keys.dtype for layer in same.layers} == {torch.float32}


def test_a_file_for_a_model_of_more_digits_is_converted(saved: Path, tmp_path: Path):
    half = HybridCache.load(saved, config_of(None), dtype=torch.bfloat16)
    half.save(tmp_path / "half.kv")
    cache = HybridCache.load(tmp_path / "half.kv", config_of(torch.float32))
    for ours, theirs in zip(cache.layers, half.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys.float())
    with pytest.raises(CacheFileError, match="has to be converted and cannot be mapped"):
        HybridCache.load(tmp_path / "half.kv", config_of(torch.float32), mmap=True)
