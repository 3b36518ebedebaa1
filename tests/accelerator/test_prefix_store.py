"""A prefix store for models on an accelerator: a hit has the bits of a cold read, wherever layers live."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, PrefixStore, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

from accelerator.orders import DEVICE
from models.tiny_models import random_prompt, tiny_model
from prefix_store.prompts import are_equal, held, prompts, read

CACHES: dict[str, Callable[..., HybridCache]] = {
    "on the device": DynamicHybridCache,
    "streamed": OffloadedHybridCache,
    "attended to on the CPU": lambda config: DynamicHybridCache(config, cpu_decode=True),
    "4 bits": QuantizedHybridCache,
    "4 bits, streamed": lambda config: QuantizedHybridCache(config, offload=True),
    "4 bits, divided": lambda config: QuantizedHybridCache(config, cpu_decode=0.5, device_tokens=256),
    "divided": lambda config: OffloadedHybridCache(config, cpu_decode=0.5, device_tokens=256),
}

# The models have short contexts.
pytestmark = [
    pytest.mark.usefixtures("in_any_order"),
    pytest.mark.filterwarnings("ignore:The prompt has .* context is 512"),
]


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_hit_when_on_the_device_then_equals_a_cold_read(make: Callable[..., HybridCache], tmp_path: Path):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    first, second = (prompt.to(DEVICE) for prompt in prompts(common=2300, first=30, second=60))
    _, cold = read(tmp_path / "cold", model, second, make(model.config), document_tokens=2300)
    read(tmp_path / "store", model, first, make(model.config), document_tokens=2300)
    reused, states = read(tmp_path / "store", model, second, make(model.config), document_tokens=2300)
    assert reused == 2300
    assert are_equal(states, cold)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_generate_with_a_store_on_the_device_answers_as_in_two_calls(make: Callable[..., HybridCache], tmp_path: Path):
    model, cache = copy.deepcopy(tiny_model("llama")).to(DEVICE), make(tiny_model("llama").config)
    first, second = (prompt.to(DEVICE) for prompt in prompts(common=300, first=30, second=60))
    options = {"max_new_tokens": 8, "do_sample": False, "num_return_sequences": 2, "num_beams": 2}
    of_store = {"custom_generate": PrefixStore(tmp_path / "store"), "document_tokens": 300, "progress": False}
    for prompt in (first, second):
        ours = model.generate(prompt, **cache_argument(make(model.config)), **of_store, **options)
    PrefixStore(tmp_path / "cold").prefill(model, second, cache, document_tokens=300, progress=False)
    assert torch.equal(ours, model.generate(second, **cache_argument(cache), **options))


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_conversation_when_on_the_device_then_goes_on(
    make: Callable[..., HybridCache], tmp_path: Path, request: pytest.FixtureRequest
):
    model, store = copy.deepcopy(tiny_model("llama")).to(DEVICE), PrefixStore(tmp_path)
    live, document = make(model.config), random_prompt(1, 700).to(DEVICE)
    store.prefill(model, document, live, progress=False)
    read_tokens = live.get_seq_length()
    tokens = model.generate(document, **cache_argument(live), max_new_tokens=70, do_sample=False)
    store.keep(model, tokens, live, document_tokens=read_tokens)
    (stored,) = (each for each in store.prompts() if each.is_conversation)
    resumed = make(model.config)
    store.resume(model, stored, resumed)
    assert are_equal(held(resumed), held(live))
    if "divided" in request.node.name:
        return  # the CPU may attend to other tokens than before, with other last bits
    answers = [
        model.generate(tokens, **cache_argument(cache), max_new_tokens=20, do_sample=False) for cache in (live, resumed)
    ]
    assert torch.equal(*answers)
