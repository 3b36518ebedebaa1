"""A prefix store for models on an accelerator: a hit has the bits of a cold read, wherever layers live."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache

from accelerator.orders import DEVICE
from common.slow import slow_but
from models.tiny_models import random_prompt, tiny_model
from prefix_store.prompts import Talk, hits, prompts

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


@pytest.mark.parametrize("name", CACHES)
def test_hit_when_on_the_device_then_equals_a_cold_read(name: str, tmp_path: Path):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    both = [prompt.to(DEVICE) for prompt in prompts(common=700, first=30, second=60)]
    assert hits(tmp_path, model, CACHES[name], *both, document=700) == [0, 700]


@pytest.mark.parametrize("name", slow_but(["on the device", "4 bits, streamed", "divided"], CACHES))
def test_conversation_when_on_the_device_then_goes_on(name: str, tmp_path: Path):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    talk = Talk(tmp_path, model, CACHES[name], random_prompt(1, 700).to(DEVICE))
    talk.tokens = talk.said(1)
    stored = talk.stored(talk.keep())
    if "divided" in name:  # the CPU may attend to other tokens than before, with other last bits
        talk.resumed(stored)
    else:
        talk.assert_goes_on_alike(stored, 20, seed=2)
