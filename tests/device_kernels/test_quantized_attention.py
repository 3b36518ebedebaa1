"""Caches with attention to codes on the device: results, memory, and requests for the states."""

import copy

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

import hf_hybrid_cache.attention.quantized_attention as module
from hf_hybrid_cache import HybridCache, KVCodec, Placement, minmax
from hf_hybrid_cache.attention.handles import KVHandle
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.device_kernels import runs_on
from hf_hybrid_cache.layers import HybridLayer

from common.channel_scaled import channel_scaled
from common.lazy_streams import copy_late
from common.quantized_reference import quantized_reference
from common.slow import slow_but
from models.tiny_models import llama, random_model, random_prompt, tiny_model

PLACES = {"resident": {}, "streamed": {"offload": True}}
# One below a block's end after the first tokens and those that stay in full precision.
PROMPT = 254


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks that were attended to, launch by launch."""
    seen = []

    def noted(*arguments):
        seen.append(arguments[4].keys.shape[2])
        return attend(*arguments)

    attend = module.attend_in_splits
    monkeypatch.setattr(module, "attend_in_splits", noted)
    return seen


def model_on(device: torch.device, family: str = "llama", layers: int = 1) -> PreTrainedModel:
    """Make a model of few layers, because the interpreter is slow."""
    if family != "llama":
        return copy.deepcopy(tiny_model(family)).to(device)
    config = llama()
    config.num_hidden_layers = layers
    return random_model(config).to(device)


def quantized(config: PreTrainedConfig, codec: KVCodec | None = None, offload: bool = False) -> HybridCache:
    cache = HybridCache(config, Placement(offload, cpu_decode=False), codec=codec or minmax(4))
    if offload and not torch.cuda.is_available():
        copy_late(cache)
    return cache


def together(config: PreTrainedConfig, **options) -> HybridCache:
    """Make the same cache, but let it assemble its states for every use."""
    cache = quantized(config, **options)
    for layer in cache.layers:
        if isinstance(layer, HybridLayer):
            layer._quantized_attention.decline("a test", 0)
    return cache


def logits_of(model, cache) -> torch.Tensor:
    """Return the logits of a prompt, and of steps after it beyond the end of a block."""
    ids = random_prompt(1, PROMPT).to(model.device)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
        steps = [model(ids[:, step : step + 1], **cache_argument(cache)).logits for step in range(2)]
    return torch.cat(steps, dim=1)


PLAIN = minmax(8, sink_tokens=0, rotate=True)
CODECS = {str(bits): minmax(bits, sink_tokens=0, rotate=True) for bits in (8, 4, (4, 2), 2)}
# Their scaling folds into queries and results.
CODECS["scaled"] = channel_scaled(minmax(4, sink_tokens=0), llama().num_key_value_heads, 16, 16)


@pytest.mark.default("values")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", slow_but(["(4, 2)", "scaled"], CODECS))
def test_logits_are_those_of_the_codes_and_no_states_are_assembled(device, launches, codec: str, place: str):
    layers = 2 if place == "streamed" else 1
    model = model_on(device, layers=layers)
    ours = quantized(model.config, CODECS[codec], **PLACES[place])
    reference = quantized_reference(model.config, CODECS[codec])
    torch.testing.assert_close(logits_of(model, ours), logits_of(model, reference), rtol=1e-3, atol=1e-4)
    assert launches == [2] * layers + [3] * layers
    assert [scratch.num_bytes for scratch in ours._stores.scratches.values()] == [0]


@pytest.mark.default("values")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "family", slow_but(["gemma4_shared"], ["gemma3", "gemma4_shared", "qwen3_next", "deepseek_v3"])
)
def test_logits_of_any_family_are_those_of_states_that_are_put_together(device, launches, family: str, place: str):
    model = model_on(device, family)
    # This one shows no queries, and a codec that is chosen by them waits a step for them.
    codec = minmax(4, rotate=True) if family == "deepseek_v3" else None
    ours, reference = (make(model.config, codec=codec, **PLACES[place]) for make in (quantized, together))
    torch.testing.assert_close(logits_of(model, ours), logits_of(model, reference), rtol=1e-3, atol=1e-4)
    # This one stores latents, of which it makes what it attends to.
    assert bool(launches) == (family != "deepseek_v3")


def tokens(model, cache, batch: int = 1, **options) -> torch.Tensor:
    ids = random_prompt(batch, PROMPT).to(model.device)
    mask = torch.ones_like(ids)
    mask[-1, : 5 * (batch - 1)] = 0  # shorter sequences are filled up in front
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask} | options
    return model.generate(ids, **cache_argument(cache), **options)


MODES = {
    "greedy": {},
    "batch": {"batch": 2},
    "beams": {"num_beams": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"prefill_chunk_size": 100},
}


@pytest.mark.default("values")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", slow_but(["batch", "prompt_lookup"], MODES))
def test_tokens_of_every_mode_are_those_of_states_that_are_put_together(launches, device, mode: str, place: str):
    model = model_on(device)
    ours = tokens(model, quantized(model.config, **PLACES[place]), **MODES[mode])
    assert launches
    launches.clear()
    assert torch.equal(ours, tokens(model, together(model.config, **PLACES[place]), **MODES[mode]))
    assert not launches


OTHERS = {
    "attention that asks for the states": ("eager", PLAIN),
    "keys by token, values by channel": ("sdpa", KVCodec(PLAIN.values, PLAIN.keys, 0)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_states_are_assembled_for_what_the_kernel_does_not_cover(device, launches, other: str):
    model, (attention, codec) = model_on(device), OTHERS[other]
    model.set_attn_implementation(attention)
    cache, reference = quantized(model.config, codec), quantized_reference(model.config, codec)
    torch.testing.assert_close(logits_of(model, cache), logits_of(model, reference), rtol=1e-3, atol=1e-4)
    assert not launches


def test_a_reset_cache_hands_out_handles_again(device, launches):
    config = llama()
    cache = quantized(config)
    states = torch.randn(1, config.num_key_value_heads, 200, 16, device=device)
    for _ in range(2):
        cache.update(states, states, 0)
        keys, _ = cache.update(states[:, :, :1], states[:, :, :1], 0)
        assert isinstance(keys, KVHandle)
        assert keys.sum().isfinite()
        assert not isinstance(cache.update(states[:, :, :1], states[:, :, :1], 0)[0], KVHandle)
        cache.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which Triton runs")
def test_where_triton_is_installed_and_runs_no_kernel_one_warning_says_so():
    pytest.importorskip("triton")
    with pytest.warns(UserWarning, match=r"Triton is installed, but runs no kernel on cuda: .* dequantized"):
        assert not runs_on(torch.device("cuda"))
    assert not runs_on(torch.device("cuda"))


def test_autocast_does_not_round_what_queries_and_results_are_mapped_by(device):
    config = llama()
    codec = channel_scaled(minmax((8, 8)), config.num_key_value_heads, config.head_dim, config.head_dim)
    states, results = torch.randn(1, config.num_key_value_heads, 200, 16, device=device), []
    for is_enabled in (False, True):
        cache = quantized(config, codec)
        cache.update(states, states, 0)
        keys, values = cache.update(states[:, :, :1], states[:, :, :1], 0)
        query = torch.ones(1, config.num_attention_heads, 1, 16, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_enabled):
            results.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
    torch.testing.assert_close(*results, rtol=0, atol=0, check_dtype=False)
