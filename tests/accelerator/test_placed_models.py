"""Models on an accelerator, or spread over it and the CPU: keys and values stay with layers; what a model is stays."""

import copy
from collections.abc import Callable

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_hybrid_cache import DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache, move_experts_to_host
from hf_hybrid_cache.cache_argument import cache_argument

from accelerator.orders import DEVICE
from common.modes import answer
from model_identity.models import differing, identity, new_llama
from models.expert_models import EXPERT_FAMILIES, expert_model
from models.tiny_models import random_prompt, tiny_model

pytestmark = pytest.mark.usefixtures("in_any_order")

CACHES: dict[str, Callable[..., Cache]] = {
    "dynamic": DynamicHybridCache,
    "streamed": OffloadedHybridCache,
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
}
each_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
PLACES = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.2"), DEVICE)
PLACES |= dict.fromkeys(("model.layers.1", "model.layers.3", "model.norm", "lm_head"), "cpu")


def generated(model: PreTrainedModel, cache: Cache, device: str = "cpu") -> torch.Tensor:
    return answer(model, random_prompt(1, 40).to(device), cache, max_new_tokens=6).cpu()


def filled(cache: Cache) -> Cache:
    with torch.no_grad():
        tiny_model("llama")(random_prompt(1, 40)[:, :30], **cache_argument(cache))
    return cache


@each_cache
@pytest.mark.parametrize("skip_keys", [None, ["past_key_values"]], ids=["sent", "skipped"])
@pytest.mark.parametrize("ids_on", ["cpu", DEVICE])
def test_layers_on_two_devices_keep_their_states_there(make: Callable, skip_keys: list[str] | None, ids_on: str):
    plain = tiny_model("llama")
    expected = generated(plain, DynamicCache(config=plain.config))
    model = copy.deepcopy(plain)
    # `dispatch_model` does this for two accelerators; it would let the weights of "cpu" wait there for one accelerator.
    attach_align_device_hook_on_blocks(
        model, PLACES | {"": DEVICE}, offload=dict.fromkeys(PLACES, False), skip_keys=skip_keys
    )
    for cache in (make(plain.config), filled(make(plain.config))):
        with torch.no_grad():
            model(random_prompt(1, 40)[:, cache.get_seq_length() : 35].to(ids_on), **cache_argument(cache))
        stores = [layer.store for layer in cache.layers]
        assert [layer.device.type for layer in cache.layers] == [DEVICE, "cpu", DEVICE, "cpu"]
        assert torch.equal(generated(model, cache, ids_on), expected)
        assert [layer.store for layer in cache.layers] == stores


@each_cache
@pytest.mark.parametrize("ids_on", ["cpu", DEVICE])
@pytest.mark.filterwarnings("ignore:You are calling .generate..:UserWarning")
def test_a_filled_cache_follows_an_offloaded_model(make: Callable, ids_on: str):
    plain = tiny_model("llama")
    expected = generated(plain, DynamicCache(config=plain.config))
    model = accelerate.cpu_offload(copy.deepcopy(plain), execution_device=torch.device(DEVICE))
    for cache in (make(plain.config), filled(make(plain.config))):
        assert torch.equal(generated(model, cache, ids_on), expected)
        assert {layer.device.type for layer in cache.layers} == {DEVICE}
        assert cache.to("cpu") is cache
        assert {layer.device.type for layer in cache.layers} == {"cpu"}
        assert cache.memory().device_bytes == 0


def test_model_when_on_the_device_then_differs_in_device_alone():
    on_cpu = identity(new_llama())
    model = new_llama().to(DEVICE)
    on_device = identity(model)
    assert differing(on_device, on_cpu) == {"device"}
    assert on_device.fields["device"] == torch.device(DEVICE).type
    with torch.no_grad():
        model.lm_head.weight[5, 7] += 1
    assert differing(identity(model), on_device) == {"weights"}


def test_model_when_experts_are_on_the_host_then_computes_on_the_device():
    model = copy.deepcopy(expert_model(next(iter(EXPERT_FAMILIES))))
    move_experts_to_host(model)
    on_cpu = identity(model)
    assert differing(identity(model.to(DEVICE)), on_cpu) == {"device"}
    assert identity(model).fields["device"] == torch.device(DEVICE).type
