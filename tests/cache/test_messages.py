"""Messages for users who do something that cannot work, and the `repr` of caches."""

import copy
import pickle
import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

import hf_hybrid_cache
from hf_hybrid_cache import (
    DeviceMemoryError,
    DynamicHybridCache,
    HostMemoryError,
    HybridCache,
    HybridCacheError,
    OffloadedHybridCache,
    QuantizedHybridCache,
    minmax,
)
from hf_hybrid_cache.cache_argument import cache_argument

from models.tiny_models import qwen3_next, random_prompt, tiny_model


@torch.no_grad()
def filled(cache: HybridCache, num_tokens: int = 300, family: str = "llama") -> HybridCache:
    tiny_model(family)(random_prompt(1, num_tokens), **cache_argument(cache))
    return cache


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


@pytest.mark.parametrize("make", [DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, HybridCache])
def test_a_cache_that_changes_nothing_says_so_where_it_is_made(make: type[HybridCache]):
    with pytest.warns(UserWarning, match="No layer .* window of it.* DynamicCache does the same") as found:
        make(qwen3_next(layer_types=["linear_attention"] * 4))
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in ("llama", "gemma3", "gemma4_shared", "mistral_sliding", "qwen3_next"):
            make(tiny_model(family).config)


def test_a_file_of_another_type_goes_on_with_more_digits_or_says_how(tmp_path: Path):
    saved, states = tmp_path / "cache.kv", torch.ones(1, 2, 1, 16)
    filled(DynamicHybridCache(tiny_model("llama").config)).save(saved)
    cache = HybridCache.load(saved, tiny_model("llama").config)
    with pytest.raises(ValueError, match=r"float32.*new states are .*bfloat16.* its type with cache\.to\(dtype\)"):
        cache.update(states.bfloat16(), states.bfloat16(), 0)
    half = cache.to(torch.bfloat16)
    half.save(tmp_path / "half.kv")
    cache = HybridCache.load(tmp_path / "half.kv", tiny_model("llama").config)
    cache.update(states, states, 0)
    assert torch.equal(cache.layers[0].keys[:, :, :-1], half.layers[0].keys.float())


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
