"""A cache as an argument: libraries move, copy, gather, pickle and inspect what a model is called with."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils.operations import (
    convert_outputs_to_fp32,
    find_device,
    send_to_device,
)
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory
from transformers import AutoModelForCausalLM, PreTrainedModel, T5GemmaConfig, T5GemmaForConditionalGeneration
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid_cache import (
    DynamicHybridCache,
    OffloadedHybridCache,
    QuantizedHybridCache,
    quantize_weights,
)
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from .same_tokens import each_cache, generated, prompt
from common.caches import MakeCache, stock
from common.modes import read
from models.architectures import small_config
from models.tiny_models import VOCAB_SIZE, random_model, tiny_model

HELD = 30


def filled(cache: Cache, model: PreTrainedModel, num_tokens: int = HELD) -> Cache:
    read(model, prompt()[:, :num_tokens], cache)
    return cache


def llama_cache(make: MakeCache = DynamicHybridCache) -> Any:
    """Return a cache that Llama has filled."""
    return filled(make(tiny_model("llama").config), tiny_model("llama"))


def without_list(family: str) -> PreTrainedModel:
    """A model of a family that does not tell accelerate to leave its cache alone."""
    config = small_config(family)
    config.vocab_size = VOCAB_SIZE
    model = random_model(config)
    assert "past_key_values" not in (model._skip_keys_device_placement or ())
    return model


def from_pretrained(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    copy.deepcopy(model).save_pretrained(folder / "model")
    places = half_on_disk(model)
    return AutoModelForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder).eval()


def half_on_disk(model: PreTrainedModel) -> dict[str, str]:
    """A device for each part of Llama or OPT."""
    layers = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    tensors = [*model.state_dict(), *(name for name, _ in model.named_buffers())]
    parts = {name.rpartition(".")[0] for name in tensors if not name.startswith(layers)}
    return dict.fromkeys(parts, "cpu") | {f"{layers}.{index}": "disk" if index > 1 else "cpu" for index in range(4)}


PLACED: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "cpu_offload": lambda model, _: accelerate.cpu_offload(model, execution_device="cpu"),
    "dispatch_model": lambda model, folder: accelerate.dispatch_model(model, half_on_disk(model), offload_dir=folder),
    "from_pretrained": from_pretrained,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_model("llama"),
    "opt": lambda: without_list("OPTConfig"),
    "qwen3_next": lambda: tiny_model("qwen3_next"),
}


@pytest.mark.default("values")
@each_cache
@pytest.mark.parametrize(
    ("way", "family"),
    [
        *((way, "llama") for way in PLACED),
        ("from_pretrained", "opt"),
        ("cpu_offload", "qwen3_next"),
    ],
)
def test_models_that_accelerate_places_use_the_cache(make: MakeCache, way: str, family: str, tmp_path: Path):
    plain = FAMILIES[family]()
    expected = generated(plain, DynamicCache(config=plain.config))
    model = PLACED[way](copy.deepcopy(plain), tmp_path)
    for cache in (make(plain.config), filled(make(plain.config), plain)):
        assert torch.equal(generated(model, cache), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.to("cpu"),
        lambda cache: send_to_device({"past": (cache,)}, "cpu")["past"][0],
        lambda cache: EncoderDecoderCache(cache, DynamicCache()).self_attention_cache,
        lambda cache: pytree.tree_map(lambda leaf: leaf, {"past": cache})["past"],
        lambda cache: pin_memory({"past": cache}, "cpu")["past"],
        lambda cache: scatter_kwargs((), {"past": cache}, [])[1],
        lambda cache: convert_outputs_to_fp32(CausalLMOutputWithPast)(**cache_argument(cache))[CACHE_ARGUMENT],
    ],
)
def test_what_hands_a_cache_on_hands_on_the_same_unchanged(call: Callable[[Any], Any]):
    cache = llama_cache()
    held = [layer.store for layer in cache.layers]
    assert call(cache) in (cache, ())
    assert [layer.store for layer in cache.layers] == held
    assert cache.get_seq_length() == HELD
    assert find_device({"past": cache, "ids": torch.ones(1)}) == torch.device("cpu")


def test_a_type_is_given_to_caches_as_to_tensors():
    double = torch.float64
    for arguments in ((double,), (double, True), ("cpu", double), (torch.ones(1, dtype=double),)):
        cache = llama_cache()
        expected = cache.layers[1].keys.double()
        assert cache.to(*arguments) is cache
        assert cache.layers[1].keys.dtype == cache.layers[1].dtype == double
        assert torch.equal(cache.layers[1].keys, expected)
    assert cache.to("cpu", dtype=torch.float32, non_blocking=True).layers[1].dtype == torch.float32


@each_cache
def test_places_and_copies_that_would_lose_states_are_refused(make: MakeCache):
    cache = llama_cache(make)
    for arguments in (("meta",), (torch.int8,), ("cpu", 3), ("nowhere",)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            cache.to(*arguments)
    for copied in (copy.copy, pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"use cache\.save\(path\) .* copy\.deepcopy\(cache\) for a copy"):
            copied(cache)
    with pytest.raises(TypeError, match="config must be a transformers config"):  # DataParallel makes one of replicas
        gather([{"past_key_values": llama_cache(make)}, {"past_key_values": cache}], "cpu")
    assert torch.equal(generated(tiny_model("llama"), cache)[:, : prompt().shape[1]], prompt())


def test_caches_and_layers_have_the_attributes_of_stock():
    model = tiny_model("llama")
    ours, stock = DynamicHybridCache(model.config), DynamicCache(config=model.config)
    for _ in range(2):
        for our, their in ((ours, stock), (ours.layers[0], stock.layers[0])):
            assert {name for name in dir(their) if not name.startswith("_")} <= set(dir(our))
            for name in ("device", "is_croppable", "is_initialized", "is_sliding", "supports_early_init", "batch_size"):
                assert getattr(our, name, None) == getattr(their, name, None)
        for cache in (ours, stock):
            filled(cache, model, 5)


def test_weights_that_accelerate_offloads_are_not_made_small():
    model = accelerate.cpu_offload(copy.deepcopy(tiny_model("llama")), execution_device="cpu")
    way_out = r"accelerate manages .* without device_map"
    with pytest.raises(ValueError, match=way_out):
        quantize_weights(model, 8)
    with pytest.raises(ValueError, match=way_out), quantize_weights(model, 8, temporary=True):
        pass


def test_t5gemma_makes_a_cross_attention_cache_of_the_class_given():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "query_pre_attn_scalar": 8, "sliding_window": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    part = sizes | heads | {"vocab_size": VOCAB_SIZE, "layer_types": ["sliding_attention", "full_attention"]}
    decoder = part | {"cross_attention_hidden_size": 32}
    config = T5GemmaConfig(encoder=part, decoder=decoder, vocab_size=VOCAB_SIZE, eos_token_id=None)
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration(config).eval()
    expected, ours = (
        generated(model, EncoderDecoderCache(make(config.decoder), OffloadedHybridCache(config.decoder)))
        for make in (stock, DynamicHybridCache)
    )
    assert torch.equal(ours, expected)
    in_few_bits = EncoderDecoderCache(DynamicHybridCache(config.decoder), QuantizedHybridCache(config.decoder, bits=8))
    with pytest.raises(TypeError, match=r"would lose bits .* Pass EncoderDecoderCache\(cache, DynamicHybridCache"):
        generated(model, in_few_bits)
