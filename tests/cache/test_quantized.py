"""QuantizedHybridCache: its memory, its errors, and codecs without kernels. The contract is in tests/generation."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from hf_hybrid_cache import (
    HybridCache,
    KVCodec,
    Placement,
    QuantizedHybridCache,
    minmax,
    quanto,
)

from common.modes import read
from models.tiny_models import random_prompt, tiny_model

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, hidden_size=512, head_dim=64)


def states(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 8, num_tokens, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill(cache: HybridCache, num_tokens: int, dtype: torch.dtype = torch.float32, attends: bool = False) -> None:
    """Store states; `attends` lets a query attend to each layer: states that wait for it are quantized."""
    for layer in range(2):
        held = cache.update(states(num_tokens, layer, dtype), states(num_tokens, layer + 10, dtype), layer)
        if attends:
            scaled_dot_product_attention(states(1, layer + 20, dtype), *held)
        del held  # its memory is lent again to the next layer


@pytest.mark.default("values")
@pytest.mark.parametrize(("bits", "most"), [(8, 0.54), (4, 0.29), ((4, 2), 0.23), (2, 0.17)])
@pytest.mark.parametrize("cpu_decode", [True, False])
def test_bytes_held_for_a_long_context_are_a_fraction_of_those_of_bfloat16(bits, most: float, cpu_decode: bool):
    cache = QuantizedHybridCache(CONFIG, bits, cpu_decode=cpu_decode)
    for _ in range(4):
        fill(cache, 8_192, torch.bfloat16, attends=True)
        if cpu_decode:
            fill(cache, 1, torch.bfloat16, attends=True)  # from now on nothing is put together on the device
    full = 2 * 2 * 8 * 64 * 2 * cache.get_seq_length()
    report = cache.memory()
    # The shared memory holds one layer's keys and values in full precision, and an eighth more.
    shared = 0 if cpu_decode else full / 2 * 1.125
    assert report.host_bytes + report.device_bytes <= most * full + shared


NO_CODE = "192 tokens before token 384 are infinite, not a number"
# Those that wait for queries go on waiting; on a device the update would first quantize them.
WAITING = "320 tokens before token 384 are infinite, or not a number"


@pytest.mark.usefixtures("short_prompts_choose")
@pytest.mark.parametrize(
    ("attends", "cpu_decode", "reason", "bad"),
    [(True, True, NO_CODE, torch.nan), (True, False, NO_CODE, torch.inf), (False, True, WAITING, torch.inf)],
)
def test_states_when_not_finite_then_are_refused_and_nothing_changes(
    attends: bool, cpu_decode: bool, reason: str, bad: float
):
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=cpu_decode)
    fill(cache, 300, attends=attends)
    twin = copy.deepcopy(cache)
    broken = states(200, seed=5)
    broken[0, 3, 17, 2] = bad
    with pytest.raises(ValueError, match=rf"{reason}.* Nothing was stored"):
        cache.update(states(200), broken, 0)
    assert cache.layers[0].get_seq_length() == 300
    assert [codec.is_fitted for codec in cache.codecs.values()] == [attends] * 2
    assert torch.equal(cache.layers[0].keys, twin.layers[0].keys)
    assert torch.equal(cache.layers[0].values, twin.layers[0].values)


def test_what_is_not_coded_yet_passes_on_what_is_not_a_number():
    cache = QuantizedHybridCache(CONFIG, bits=4, cpu_decode=False)
    fill(cache, 300)
    broken = states(1)
    broken[0, 0, 0, 0] = float("nan")
    keys, _ = cache.update(broken, states(1), 0)
    assert torch.isnan(keys[0, 0, -1, 0])


def without_kernel(name: str) -> KVCodec:
    """Return a codec for which there is no kernel."""
    if name == "quanto":
        pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install hf_hybrid_cache[quanto]")
        return quanto(4)
    return KVCodec(minmax(8).values, minmax(8).keys)  # keys are grouped as values are


@pytest.mark.parametrize("name", ["quanto", "swapped grouping"])
def test_codec_when_the_cpu_shall_attend_without_kernel_then_is_refused(name: str):
    model = tiny_model("llama")
    cache = HybridCache(model.config, Placement(cpu_decode=True), codec=without_kernel(name))
    with pytest.raises(ValueError, match="There is no kernel that attends to"):
        read(model, random_prompt(1, 301), cache)
