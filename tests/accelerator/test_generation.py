"""`generate` on an accelerator, all of it or with the decode phase on the CPU, in every mode and with every cache."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, HybridCache, Placement, QuantizedHybridCache, minmax
from hf_hybrid_cache.cache_argument import cache_argument

import simulated
from accelerator.decoding import Watcher, decode
from accelerator.orders import DEVICE, ORDERS, in_order
from common.caches import CACHES, stock
from common.quantized_reference import quantized_reference
from models.tiny_models import FAMILIES, VOCAB_SIZE, llama, random_prompt, tiny_model
from processes.groups import Group


@pytest.fixture(autouse=True)
def in_any_order() -> Iterator[None]:
    with in_order(ORDERS[-1]):
        yield


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_the_device_equal_those_of_dynamic_cache(cache: str, family: str):
    model = tiny_model(family).to(DEVICE)
    try:
        ids = random_prompt(2, 40).to(DEVICE)
        outputs = [
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **cache_argument(make(model.config)),
                max_new_tokens=40,
                do_sample=False,
            )
            for make in (CACHES[cache], stock)
        ]
    finally:
        model.to("cpu")
    assert torch.equal(*outputs)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"cpu_decode": True}], ids=["device", "streamed", "cpu"])
@pytest.mark.parametrize("bits", [8, (4, 2), 2])
def test_logits_of_quantized_caches_on_the_device_are_those_of_the_codes(bits, options: dict):
    model = tiny_model("llama").to(DEVICE)
    try:
        ids = random_prompt(2, 250).to(DEVICE)  # the steps go beyond the end of a block
        logits = []
        for cache in (
            HybridCache(model.config, Placement(**options), codec=minmax(bits, sink_tokens=0, rotate=True)),
            quantized_reference(model.config, minmax(bits, sink_tokens=0, rotate=True)),
        ):
            with torch.no_grad():
                model(ids, **cache_argument(cache))
                steps = [model(ids[:, step : step + 1], **cache_argument(cache)).logits for step in range(10)]
            logits.append(torch.cat(steps, dim=1))
    finally:
        model.to("cpu")
    torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_decoded_on_the_cpu_equal_those_of_the_device(cache: str, family: str):
    model = copy.deepcopy(tiny_model(family)).to(DEVICE)
    ids = random_prompt(2, 40)
    ours = decode(model, ids, CACHES[cache](model.config), custom_generate=DecodeOnCPU())
    assert ours.device.type == DEVICE
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {DEVICE}
    assert torch.equal(ours, decode(model, ids, stock(model.config)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prefill_chunk_size": 7},
        {"prompt_lookup_num_tokens": 3},
        {"eos_token_id": [7, 11], "repetition_penalty": 1.2, "min_new_tokens": 5},
    ],
    ids=["beams", "chunked_prefill", "prompt_lookup", "processors"],
)
def test_every_way_to_generate_decodes_on_the_cpu(options):
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    ids = random_prompt(1, 30)
    ours = decode(model, ids, DynamicHybridCache(model.config), custom_generate=DecodeOnCPU(), **options)
    assert torch.equal(ours, decode(model, ids, stock(model.config), **options))


def test_an_assistant_on_the_device_drafts_for_a_model_on_the_cpu():
    model, assistant = (copy.deepcopy(tiny_model("llama")).to(DEVICE) for _ in range(2))
    devices = Watcher(lambda: (assistant.device.type, model.device.type))
    with assistant.register_forward_hook(lambda *_: devices.put(torch.empty(0))):
        cache = DynamicHybridCache(model.config)
        options = {"custom_generate": DecodeOnCPU(), "assistant_model": assistant}
        ours = decode(model, random_prompt(1, 30), cache, **options)
    assert set(devices.notes) == {(DEVICE, "cpu")}
    assert torch.equal(ours, decode(model, random_prompt(1, 30), stock(model.config)))


def test_logits_are_processed_where_the_inputs_are():
    class Favour(LogitsProcessor):
        bias = torch.zeros(VOCAB_SIZE, device=DEVICE).index_fill(0, torch.tensor(9, device=DEVICE), 4.0)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + self.bias

    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    ids, options = random_prompt(2, 20), {"logits_processor": [Favour()]}
    ours = decode(model, ids, DynamicHybridCache(model.config), custom_generate=DecodeOnCPU(), **options)
    assert torch.equal(ours, decode(model, ids, stock(model.config), **options))


def test_an_interrupt_brings_model_and_cache_back_to_the_device():
    def interrupt() -> None:
        if model.device.type == "cpu":
            raise KeyboardInterrupt

    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    cache = DynamicHybridCache(model.config)
    in_bfloat16 = DecodeOnCPU(dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        decode(model, random_prompt(1, 20), cache, custom_generate=in_bfloat16, streamer=Watcher(interrupt))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), weights, strict=True))
    assert {layer.keys.device.type for layer in cache.layers} == {DEVICE}
    cache.reset()
    reference = decode(model, random_prompt(1, 20), stock(model.config))
    assert torch.equal(decode(model, random_prompt(1, 20), cache), reference)


def test_kept_weights_are_copied_to_the_host_once():
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    keeping = DecodeOnCPU(keep_weights=True)
    places = Watcher(lambda: [parameter.data_ptr() for parameter in model.parameters()])
    outputs = []
    for _ in range(2):
        cache = DynamicHybridCache(model.config)
        outputs.append(decode(model, random_prompt(1, 20), cache, custom_generate=keeping, streamer=places))
    assert places.notes[1] == places.notes[-1]
    assert torch.equal(*outputs)


def test_frequencies_that_a_model_replaces_on_the_device_go_to_the_cpu():
    config = llama()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 16
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    reference = decode(copy.deepcopy(model).to(DEVICE), random_prompt(1, 30), stock(config), prefill_chunk_size=8)
    options = {"custom_generate": DecodeOnCPU(), "prefill_chunk_size": 8}
    assert torch.equal(decode(model.to(DEVICE), random_prompt(1, 30), DynamicHybridCache(config), **options), reference)
    assert {buffer.device.type for buffer in model.buffers()} == {DEVICE}


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


@pytest.mark.parametrize("bits", [None, 8])
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
