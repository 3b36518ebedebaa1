"""`custom_generate=DecodeOnCPU()`: the same tokens, and model and cache where they should be, whatever happens."""

import copy
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from contracts.decoding import DecodesOnCpu, Home, Watcher, decode, interrupting, plain, plain_in_bits, whereabouts
from contracts.generation import IN_FLOAT64
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
)

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, HostMemoryError, QuantizedHybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument

from common.caches import dynamic, stock
from common.interruptions import Interruption
from common.soak import budget, count
from models.image_models import model_of_images, prompt_with_picture
from models.tiny_models import llama, random_prompt, tiny_model

CPU = torch.device("cpu")
DECODED = {"custom_generate": IN_FLOAT64}


class TestInFloat64(DecodesOnCpu):
    # On the CPU a model can decode as it is.
    device, dtype, way_out = "cpu", torch.float64, r"pass custom_generate=DecodeOnCPU\(\) without"


def new_llama() -> PreTrainedModel:
    return copy.deepcopy(tiny_model("llama"))


def test_images_are_computed_with_the_prompt():
    model, inputs = model_of_images(), prompt_with_picture()
    ids = inputs.pop("input_ids")
    tokens = decode(model, ids, DynamicHybridCache(model.config), custom_generate=IN_FLOAT64, **inputs)
    assert torch.equal(tokens, decode(model, ids, stock(model.config), **inputs))


def test_a_quantized_cache_goes_along():
    model, ids = tiny_model("llama"), random_prompt(1, 200)
    caches = [QuantizedHybridCache(model.config, bits=8, cpu_decode=False) for _ in range(2)]
    tokens = [decode(model, ids, cache, **options) for cache, options in zip(caches, ({}, DECODED), strict=True)]
    assert torch.equal(*tokens)
    assert whereabouts(caches[1]) == {(CPU, model.dtype)}


# --- weights


def test_weights_that_a_model_keeps_in_float32_stay_so():
    model = copy.deepcopy(tiny_model("deepseek_v3"))
    model._keep_in_fp32_modules_strict = {"q_a_layernorm"}
    watcher = Watcher(lambda: {name for name, weight in model.named_parameters() if weight.dtype == torch.float32})
    options = {"custom_generate": DecodeOnCPU(torch.bfloat16), "max_new_tokens": 1, "streamer": watcher}
    decode(model, random_prompt(1, 9), **options)
    assert watcher.notes[1] == {name for name, _ in model.named_parameters() if "q_a_layernorm" in name}


def test_indices_and_masks_in_a_checkpoint_are_moved_along():
    model, ids = new_llama(), random_prompt(1, 5)
    model.lm_head.register_buffer("indices", torch.arange(3))
    model.lm_head.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    home = Home(model)
    assert torch.equal(decode(model, ids, custom_generate=IN_FLOAT64), plain(model, ids))
    home.require()
    watcher = Watcher(lambda: [parameter.data_ptr() for parameter in model.parameters()])
    decode(model, ids, custom_generate=DecodeOnCPU(torch.float32), streamer=watcher)  # its own type: nothing moves
    assert watcher.notes[0] == watcher.notes[1] == watcher.observe()


def scaled(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    with torch.no_grad():
        weight *= 3
    return weight


# Version counters do not notice what is done to the data.
CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": scaled,
    "data": lambda weight: weight.data.mul_(3),
    "order of data": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "another parameter": lambda weight: torch.nn.Parameter(weight.detach() * 3),
}


@pytest.mark.parametrize("bits", [None, 8])
def test_weights_are_copied_again_when_one_has_changed(bits: int | None):
    model, ids = new_llama(), random_prompt(1, 30)
    decoder = DecodeOnCPU(torch.float64 if bits is None else None, keep_weights=True, weights=bits)
    before = [decode(model, ids, custom_generate=decoder) for _ in range(2)]
    layer = model.model.layers[1].mlp.down_proj
    for name, change in CHANGES.items():
        changed = change(layer.weight)
        if name == "another parameter":
            layer.weight = changed
        before.append(decode(model, ids, custom_generate=decoder))
        expected = plain(model, ids) if bits is None else plain_in_bits(model, ids, bits)
        assert torch.equal(before[-1], expected), name
        assert not torch.equal(*before[-2:]), name
    assert torch.equal(*before[:2])


def test_kept_weights_live_as_long_as_the_model():
    decoder, model, used = DecodeOnCPU(torch.float64, keep_weights=True), new_llama(), list[StorageWeakRef]()

    def note(module: torch.nn.Linear, _: object) -> None:
        if module.weight.dtype == torch.float64:
            used.append(StorageWeakRef(module.weight.untyped_storage()))

    model.lm_head.register_forward_pre_hook(note)
    decode(model, random_prompt(1, 9), max_new_tokens=3, custom_generate=decoder)
    assert not used[0].expired()
    del model
    gc.collect()
    assert used[0].expired()


def test_a_model_of_few_bits_already_decodes_and_is_not_moved():
    model, ids = new_llama(), random_prompt(1, 20)
    quantize_weights(model, 8)
    assert torch.equal(decode(model, ids, custom_generate=DecodeOnCPU()), decode(model, ids))
    with pytest.raises(ValueError, match="QuantizedWeight"):
        decode(model, ids, custom_generate=DecodeOnCPU(weights=4))


# --- what ends a call early


class Homebound(DynamicHybridCache):
    """A cache that holds tokens and is refused moves to the types in `refused`, in this order."""

    refused: list[tuple[torch.dtype, BaseException]]

    def to(self, device: Any, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if self.refused and dtype == self.refused[0][0] and self.get_seq_length():
            raise self.refused.pop(0)[1]


LEAVE, RETURN = torch.float64, torch.float32
FULL = torch.OutOfMemoryError("8 GiB are too many.")


@pytest.mark.parametrize(
    ("refused", "ends_with", "returns"),
    [
        ([(LEAVE, HostMemoryError("no room"))], HostMemoryError, True),
        ([(RETURN, KeyboardInterrupt())] * 2, KeyboardInterrupt, False),
        ([(RETURN, FULL)], None, False),
    ],
    ids=["no room", "interrupted twice", "no way back"],
)
def test_cache_that_cannot_be_moved_then_stays_together_with_the_model(
    refused: list[tuple[torch.dtype, BaseException]],
    ends_with: type[BaseException] | None,
    returns: bool,
    recwarn: pytest.WarningsRecorder,
):
    model, ids = new_llama(), random_prompt(1, 20)
    home, reference, cache = Home(model), plain(model, ids), Homebound(model.config)
    cache.refused = list(refused)
    try:
        tokens = decode(model, ids, cache, custom_generate=IN_FLOAT64)
        assert ends_with is None
        assert torch.equal(tokens, reference)
    except (HostMemoryError, KeyboardInterrupt) as error:
        assert type(error) is ends_with  # noqa: PT017
    assert not cache.refused
    assert cache.get_seq_length() >= 20
    if returns:
        home.require(cache)
    assert whereabouts(cache) == {(CPU, model.dtype)} == {(CPU, RETURN if returns else LEAVE)}
    decode(model, torch.cat([reference, reference], dim=1), cache)
    said = [str(each.message) for each in recwarn]
    assert len(said) == ((RETURN, FULL) in refused)
    assert all("stay on the CPU" in each and "use model.to('cpu')" in each and str(FULL) in each for each in said)


@pytest.mark.soak
@pytest.mark.parametrize("decoder", [IN_FLOAT64, DecodeOnCPU(weights=8)], ids=["float64", "8 bits"])
def test_ended_at_any_line_model_and_cache_are_together(decoder: DecodeOnCPU):
    ids = random_prompt(1, 20)
    reference = decode(new_llama(), ids, custom_generate=decoder)

    def trial(error: type[BaseException] = KeyboardInterrupt, at_line: int | None = None) -> Interruption:
        model = new_llama()
        home, cache = Home(model), dynamic(model.config)
        fault = Interruption(error, at_line, folder="decode_phase")
        fault.run(lambda: decode(model, ids, cache, custom_generate=decoder, prefill_chunk_size=8))
        if fault.place is not None:
            home.require(cache)
            cache.reset()
            assert torch.equal(decode(model, ids, cache, custom_generate=decoder), reference), fault.place
            count("faults injected")
        return fault

    lines, chosen = range(trial().lines), random.Random(0)
    for at_line in chosen.sample(lines, min(len(lines), budget(2))):
        trial(chosen.choice([KeyboardInterrupt, RuntimeError]), at_line)


# --- what is refused


def managed_by_accelerate(model: PreTrainedModel) -> None:
    dispatch_model(model, {"": "cpu"}, force_hooks=True)


def bart() -> PreTrainedModel:
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 128}
    return BartForConditionalGeneration(BartConfig(**sizes, encoder_layers=1, decoder_layers=1)).eval()


def small_vocabulary() -> PreTrainedModel:
    config = llama()
    config.vocab_size = 99
    return AutoModelForCausalLM.from_config(config).eval()


# What makes options of `generate`, and what the error says.
OPTIONS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"use_cache": False}, r"use_cache=False forbids it.*Pass use_cache=True"),
    (lambda: {"synced_gpus": True}, "synced_gpus=True, but weights shared out to processes cannot be moved"),
    (
        lambda: {"dola_layers": "high"},
        r"DOLA_GENERATION is not part of transformers any more \(transformers-community/dola\)",
    ),
    (lambda: {"num_beams": 2, "streamer": interrupting(after=3)}, "`streamer` cannot be used with beam search"),
    (
        lambda: {"assistant_model": small_vocabulary()},
        r"vocabulary has 99 tokens and the model's 128.*Use an assistant with",
    ),
]
# What is done to a model, how it is to decode, and what the error says.
MODELS: list[tuple[Callable[[PreTrainedModel], object], DecodeOnCPU, str]] = [
    (managed_by_accelerate, IN_FLOAT64, r"accelerate manages .* device_map='cuda:0'"),
    (
        lambda model: setattr(model, "hf_quantizer", SimpleNamespace(quantization_config={"bits": 4})),
        IN_FLOAT64,
        r"Quantized weights \(dict\) cannot be moved or converted\. Load the model unquantized",
    ),
    (
        lambda model: setattr(model.config, "_attn_implementation", "flash_attention_2"),
        IN_FLOAT64,
        r"flash_attention_2 runs only on GPUs. Use model\.set_attn_implementation",
    ),
    (
        lambda model: model.lm_head.weight.data[3].fill_(torch.nan),
        DecodeOnCPU(weights=8),
        r"lm_head.weight has numbers that are infinite or not a number. Use weights=N",
    ),
    (
        # A view of one number: 2**40 of them cost the test nothing.
        lambda model: setattr(model.lm_head.weight, "data", torch.ones(1).expand(2**20, 2**20)),
        IN_FLOAT64,
        r"Weights to decode with on the CPU need 8192\.\d+ GiB more host memory",
    ),
]


def test_what_cannot_decode_on_the_cpu_is_refused_before_the_prompt():
    for dtype in ("float32", torch.int8, 32):
        with pytest.raises(TypeError, match=r"dtype must be None or one of torch\.float64, .*, got "):
            DecodeOnCPU(dtype=dtype)
    with pytest.raises(TypeError, match="keep_weights must be True or False, got 1"):
        DecodeOnCPU(keep_weights=1)
    model, ids = tiny_model("llama"), random_prompt(1, 5)
    for given in ({}, cache_argument(stock(model.config))):
        with pytest.raises(TypeError, match=rf"type DynamicCache\. Pass {CACHE_ARGUMENT}=DynamicHybridCache"):
            model.generate(ids, **given, max_new_tokens=2, custom_generate=DecodeOnCPU())
    with pytest.raises(ValueError, match="decoder-only models, and BartForConditionalGeneration is an encoder-decoder"):
        bart().generate(ids, max_new_tokens=2, num_beams=1, custom_generate=DecodeOnCPU())
    for options, message in OPTIONS:
        with pytest.raises(ValueError, match=message):
            decode(model, ids, custom_generate=DecodeOnCPU(), **options())


@pytest.mark.parametrize(("change", "decoder", "message"), MODELS, ids=range(len(MODELS)))
def test_model_that_cannot_be_moved_is_refused_before_the_prompt(change: Callable, decoder: DecodeOnCPU, message: str):
    model, cache = new_llama(), dynamic(llama())
    change(model)
    with pytest.raises((ValueError, HostMemoryError), match=message):
        decode(model, random_prompt(1, 20), cache, custom_generate=decoder)
    assert cache.get_seq_length() == 0
    assert model.dtype == torch.float32


def test_models_that_accelerate_manages_decode_where_they_are():
    model, ids = new_llama(), random_prompt(1, 5)
    managed_by_accelerate(model)
    assert torch.equal(decode(model, ids, custom_generate=DecodeOnCPU()), plain(tiny_model("llama"), ids))
