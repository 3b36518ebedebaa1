"""Messages for users who do something that cannot work, and the `repr` of caches."""

import copy
import pickle
import re
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import hf_hybrid_cache
from hf_hybrid_cache import (
    CacheFileError,
    DecodeOnCPU,
    DeviceMemoryError,
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    HybridCacheError,
    OffloadedHybridCache,
    QuantizedHybridCache,
    minmax,
)
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from models.tiny_models import qwen3_next, random_prompt, tiny_model


@torch.no_grad()
def filled(cache: HybridCache, num_tokens: int = 300, family: str = "llama") -> HybridCache:
    tiny_model(family)(random_prompt(1, num_tokens), **cache_argument(cache))
    return cache


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, HybridCache])
def test_a_cache_that_changes_nothing_says_so_where_it_is_made(make: type[HybridCache]):
    with pytest.warns(UserWarning, match="No layer .* window of it.* DynamicCache does the same") as found:
        make(qwen3_next(layer_types=["linear_attention"] * 4))
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in ("llama", "gemma3", "gemma4_shared", "mistral_sliding", "qwen3_next"):
            make(tiny_model(family).config)


def test_a_class_for_a_cache_is_named():
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    way_out = rf"{CACHE_ARGUMENT}=DynamicHybridCache\(model\.config\)"
    for cache in (DynamicHybridCache, QuantizedHybridCache):
        for use in (partial(model.generate, max_new_tokens=2), model):
            with pytest.raises(TypeError, match=rf"{CACHE_ARGUMENT} is a class of caches.* {way_out}"):
                use(ids, **cache_argument(cache))
        with pytest.raises(TypeError, match=f"Pass {way_out}"):
            model.generate(ids, **cache_argument(cache), max_new_tokens=2, custom_generate=DecodeOnCPU())


def test_a_cache_of_fewer_layers_than_the_model_names_both():
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"has a layer 3 \(counted from 0\), and the cache was made for 3 layers"):
        filled(DynamicHybridCache(config))


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
        "QuantizedHybridCache(1 layer of 8 bits, 1 layer in full precision, 2 with a window; empty)"
    )


def config_of(dtype: torch.dtype | None) -> LlamaConfig:
    config = copy.deepcopy(tiny_model("llama").config)
    config.dtype = dtype
    return config


def test_a_file_is_converted_to_more_digits_and_to_fewer_if_asked(tmp_path: Path):
    saved = tmp_path / "cache.kv"
    filled(DynamicHybridCache(tiny_model("llama").config)).save(saved)
    with pytest.raises(
        CacheFileError, match=r"in float32, and the model is in bfloat16: load .*dtype=torch\.float32, or"
    ):
        HybridCache.load(saved, config_of(torch.bfloat16))
    same = HybridCache.load(saved, config_of(torch.bfloat16), dtype=torch.float32)
    assert {layer.keys.dtype for layer in same.layers} == {torch.float32}
    half = HybridCache.load(saved, config_of(torch.bfloat16), dtype=torch.bfloat16)
    assert {layer.keys.dtype for layer in half.layers} == {torch.bfloat16}
    half.save(tmp_path / "half.kv")
    cache = HybridCache.load(tmp_path / "half.kv", config_of(torch.float32))
    for ours, theirs in zip(cache.layers, half.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys.float())
    with pytest.raises(CacheFileError, match="has to be converted and cannot be mapped"):
        HybridCache.load(tmp_path / "half.kv", config_of(torch.float32), mmap=True)


# Errors


def subclasses(kind: type[BaseException]) -> set[type[BaseException]]:
    return {each for direct in kind.__subclasses__() for each in (direct, *subclasses(direct))}


def test_every_error_extends_the_base_and_one_that_was_there_before():
    package = Path(hf_hybrid_cache.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"^class \w+(Error|Exception|Interrupt)\b", path.read_text(), re.MULTILINE):
            import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    errors = {each for each in subclasses(BaseException) if each.__module__.startswith("hf_hybrid_cache.")}
    assert len(errors) > 10
    for error in errors - {HybridCacheError}:
        assert issubclass(error.__bases__[0], HybridCacheError), error
        known = next(each for each in error.__mro__ if each.__module__ in ("builtins", "torch"))
        assert known is not Exception, error


@pytest.mark.parametrize(("error", "known"), [(HostMemoryError, MemoryError), (DeviceMemoryError, RuntimeError)])
def test_an_error_is_caught_as_either_and_pickled_as_it_is(error: type[Exception], known: type[Exception]):
    for caught in (HybridCacheError, known):
        with pytest.raises(caught, match="4 GiB") as raised:
            raise pickle.loads(pickle.dumps(error("4 GiB")))
        assert raised.type is error


def test_a_layer_whose_codec_is_none_stays_in_full_precision():
    cache = HybridCache(tiny_model("llama").config, codec={0: None, 2: minmax(4)})
    assert list(cache.codecs) == [2]
