"""`DecodeOnCPU` and groups of processes for models on an accelerator."""

import copy
from pathlib import Path

import pytest
import torch
from contracts.decoding import DecodesOnCpu, decode, plain, whereabouts
from contracts.generation import IN_FLOAT64

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, QuantizedHybridCache, prefill
from hf_hybrid_cache.cache_argument import cache_argument

import simulated
from accelerator.orders import DEVICE
from common.caches import dynamic, stock
from common.slow import slow
from models.tiny_models import llama, random_model, random_prompt, tiny_model
from processes.groups import Group

pytestmark = pytest.mark.usefixtures("in_any_order")


class TestOnAccelerator(DecodesOnCpu):
    device, dtype, way_out = DEVICE, None, "leave out custom_generate"

    def test_model_and_cache_when_moved_after_a_prefill_then_stay_on_the_cpu(self):
        model, ids = self.make_model(), random_prompt(2, 20)
        cache = prefill(model, ids[:, :-1], dynamic(model.config))
        model.to("cpu")
        cache.to("cpu")
        assert torch.equal(decode(model, ids, cache), plain(model, ids))
        assert whereabouts(cache) == {(torch.device("cpu"), torch.float32)}

    def test_frequencies_that_a_model_replaces_on_the_device_go_to_the_cpu(self):
        config = llama()
        config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        config.max_position_embeddings = 16
        model = random_model(config).to(DEVICE)
        options = {"prefill_chunk_size": 8}
        reference = plain(model, random_prompt(1, 30), **options)
        tokens = decode(model, random_prompt(1, 30), custom_generate=DecodeOnCPU(), **options)
        assert torch.equal(tokens.cpu(), reference)
        assert {buffer.device.type for buffer in model.buffers()} == {DEVICE}

    def test_weights_on_several_devices_are_refused(self):
        model = self.make_model()
        model.lm_head.to("cpu")
        with pytest.raises(
            ValueError, match=rf"Weights are on (cpu and {DEVICE}:0|{DEVICE}:0 and cpu)\. Move the model"
        ):
            decode(model, random_prompt(1, 5), custom_generate=IN_FLOAT64)


def generate_together(bits: int | None, device: str, simulator: Path) -> list[list[int]]:
    """Generate in one process of a group, with the model on a device and its keys and values divided."""
    if device == "sim":
        simulated.load(simulator)
    model = copy.deepcopy(tiny_model("llama")).to(device)
    group = torch.distributed.group.WORLD
    cache = (
        DynamicHybridCache(model.config, group=group)
        if bits is None
        else QuantizedHybridCache(model.config, bits, group=group)
    )
    ids = random_prompt(1, 300).to(device)
    tokens = model.generate(
        ids, **cache_argument(cache), max_new_tokens=20, do_sample=False, prefill_chunk_size=100
    ).tolist()
    assert cache.memory().device_bytes == 0 or bits is not None
    assert cache.layers[0].keys.device.type == device
    return tokens


@pytest.mark.parametrize("bits", [None, slow(8)])
def test_processes_share_the_cache_of_a_model_on_the_device(bits: int | None, pytestconfig: pytest.Config):
    with Group(2) as group:
        together = group.call(generate_together, bits, DEVICE, pytestconfig.cache.mkdir("simulated"))
    assert together[0] == together[1]
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    alone = model.generate(
        random_prompt(1, 300).to(DEVICE), **cache_argument(stock(model.config)), max_new_tokens=20, do_sample=False
    )
    # With a random model, codes of 8 bits change some tokens.
    assert bits is not None or together[0] == alone.tolist()
