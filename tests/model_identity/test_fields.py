"""Everything that states depend on, each byte of each weight too, changes its field, and nothing else does."""

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from xxhash import xxh3_128_digest

from hf_hybrid_cache import (
    DynamicHybridCache,
    HybridCache,
    KVCodec,
    QuantizedHybridCache,
    QuantizedWeightsConfig,
    minmax,
    move_experts_to_host,
    quantize_weights,
)
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.model_identity import ModelIdentityError, identity_of
from hf_hybrid_cache.model_identity.weights import tensor_digests

from common.channel_scaled import channel_scaled
from common.soak import search_at_random
from model_identity.models import differing, identity, new_llama
from models.expert_models import expert_model
from models.tiny_models import FAMILIES, random_prompt, tiny_model

# --- models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_loaded_or_has_generated_is_the_same(family: str, tmp_path: Path):
    model = tiny_model(family)
    before = identity(model)
    model.save_pretrained(tmp_path)
    assert differing(identity(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), before) == set()
    model.generate(random_prompt(1, 70), max_new_tokens=3, do_sample=False)
    assert differing(identity(model), before) == set()


def up(model: Any, layer: int = 0) -> torch.Tensor:
    return model.model.layers[layer].mlp.up_proj.weight


def flip_a_bit(tensor: torch.Tensor, at: int = 0) -> None:
    """Change the lowest bit of a number, or the only one of a boolean."""
    tensor.view(torch.uint8).view(-1)[at * tensor.itemsize].bitwise_xor_(1)


def set_config(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda model: setattr(model.config, name, value)


def turned(**rotation: Any) -> Callable[[Any], Any]:
    """A model that turns keys otherwise."""
    return lambda _: new_llama(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0} | rotation)


@torch.no_grad()
def changed(model: PreTrainedModel, change: Callable[[Any], Any]) -> PreTrainedModel:
    """Return a model after a change, or another one that the change makes."""
    other = change(model)
    return other if isinstance(other, PreTrainedModel) else model


# Fields that differ after a change of a model, or of another one.
CHANGES: list[tuple[set[str], Callable[[Any], Any]]] = [
    (set(), set_config("use_cache", False)),
    ({"dtype", "weights"}, lambda model: model.to(torch.bfloat16)),
    ({"weights"}, lambda model: torch.utils.swap_tensors(up(model, 0), up(model, 1))),
    ({"weights"}, lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0))),
    ({"weights"}, lambda model: model.load_state_dict(new_llama(seed=1).state_dict(), assign=True)),
    ({"config"}, set_config("rms_norm_eps", 1e-5)),
    ({"attention"}, lambda model: model.set_attn_implementation("eager")),
    ({"modules"}, lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5)),
    ({"modules"}, lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU().eval())),
    ({"config", "weights"}, turned(rope_theta=20_000.0)),
    ({"config", "weights", "modules"}, turned(rope_type="linear", factor=2.0)),
]


@pytest.mark.parametrize(("fields", "change"), CHANGES)
def test_a_changed_model_differs_where_states_depend_on_it(fields: set[str], change: Callable[[Any], Any]):
    model = new_llama()
    before = identity(model)
    model = changed(model, change)
    assert differing(identity(model), before) == fields
    assert identity(copy.deepcopy(model)) == identity(model)


@search_at_random(15)
@given(data=st.data())
def test_identity_when_any_bit_of_a_tensor_changes_then_differs_in_weights(data: st.DataObject):
    model = new_llama()
    before, tensors = identity(model), [*model.parameters(), *model.buffers()]
    tensor = data.draw(st.sampled_from(tensors)).data
    flip_a_bit(tensor, data.draw(st.integers(0, tensor.numel() - 1)))
    assert differing(identity(model), before) == {"weights"}


def test_autocast_counts_as_a_dtype():
    model = new_llama()
    before = identity(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(identity(model), before) == {"dtype"}
    assert identity(model) == before


# Switches of the whole process: what sets them, to what, and to what they are set otherwise.
SWITCHES: list[tuple[Callable[[Any], object], Any, Any]] = [
    (torch.set_float32_matmul_precision, "medium", "highest"),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_num_threads, 3, torch.get_num_threads()),
    (torch.use_deterministic_algorithms, True, False),
    (torch.backends.cuda.enable_flash_sdp, False, True),
    (partial(setattr, torch.backends.cuda.matmul, "allow_tf32"), True, False),
    (partial(setattr, torch.backends.cudnn, "benchmark"), True, False),
    (partial(setattr, torch.backends.mkldnn.matmul, "fp32_precision"), "bf16", "none"),
    (set_integer_kernels, False, None),
]


@pytest.mark.filterwarnings("ignore:Please use the new API")
@pytest.mark.parametrize(("switch", "to", "back"), SWITCHES)
def test_a_switch_of_the_process_changes_an_identity_until_it_is_set_back(switch: Callable, to: Any, back: Any):
    model = new_llama()
    before = identity(model)
    try:
        switch(to)
        assert differing(identity(model), before)
    finally:
        switch(back)
    assert identity(model) == before


def test_identity_on_another_thread_or_without_gradients_is_the_same():
    model = new_llama()
    before = identity(model)
    with torch.no_grad(), ThreadPoolExecutor(1) as threads:
        assert threads.submit(identity, model).result() == identity(model) == before


# --- caches


def scaled(seed: int) -> KVCodec:
    return channel_scaled(minmax(4), 2, 16, 16, seed=seed)


FORMS: dict[str, Callable[[Any], HybridCache]] = {
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
    "4 bits": QuantizedHybridCache,
    "other values": lambda config: QuantizedHybridCache(config, bits=(8, 4)),
    "one layer": lambda config: QuantizedHybridCache(config, bits={1: 4}),
    "no sinks": lambda config: HybridCache(config, codec=minmax(4, sink_tokens=0)),
    "rotated": lambda config: HybridCache(config, codec=minmax(4, rotate=True)),
    **{f"scaled {seed}": lambda config, seed=seed: HybridCache(config, codec=scaled(seed)) for seed in (0, 1)},
}


def test_caches_of_other_codecs_differ_in_codecs_alone():
    model = tiny_model("llama")
    first, again = ([identity_of(model, make(model.config)) for make in FORMS.values()] for _ in range(2))
    assert again == first
    for one, other in itertools.combinations([identity(model), *first], 2):
        assert differing(one, other) == {"codecs"}


def test_a_cache_that_has_chosen_its_codecs_has_the_same_identity():
    model = tiny_model("llama")
    cache = QuantizedHybridCache(model.config)
    before = identity_of(model, cache)
    with torch.no_grad():
        model(random_prompt(1, 640), **cache_argument(cache))
    assert all(codec.is_fitted for codec in cache.codecs.values())
    assert identity_of(model, cache) == identity_of(model, copy.deepcopy(cache)) == before
    cache.reset()
    assert identity_of(model, cache) == before


def test_what_is_no_model_or_no_cache_of_ours_is_refused():
    model = new_llama()
    with pytest.raises(TypeError, match="Linear"):
        identity_of(nn.Linear(2, 2), DynamicHybridCache(model.config))
    with pytest.raises(TypeError, match="DynamicCache"):
        identity_of(model, DynamicCache(config=model.config))


# --- weights


def test_tied_weights_count_once_and_differ_from_equal_ones():
    tied, equal = new_llama(tie_word_embeddings=True), new_llama()
    equal.load_state_dict(tied.state_dict())
    assert "weights" in differing(identity(tied), identity(equal))
    assert identity(tied) == identity(new_llama(tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float32), ((0, 3), torch.bool), ((1500, 2, 701), torch.bfloat16), ((2, 300_000), torch.complex64)],
)
def test_the_digest_of_any_view_is_that_of_its_bytes(shape: tuple[int, ...], dtype: torch.dtype):
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = data.view(dtype).view(shape)
    views = [
        tensor,
        tensor.t() if tensor.dim() < 3 else tensor.transpose(1, 2),
        tensor.expand(2, *shape),
        tensor.conj(),
    ]
    copies = [view.contiguous().resolve_conj().flatten().view(torch.uint8).numpy() for view in views]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert tensor_digests(views) == [xxh3_128_digest(copy) for copy in copies]
    finally:
        torch.set_num_threads(before)


def test_quantized_weights_are_the_same_if_loaded_and_differ_in_any_code(tmp_path: Path):
    models = [new_llama() for _ in range(4)]
    models[0].save_pretrained(tmp_path)
    config = QuantizedWeightsConfig(4)
    models.append(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval())
    plain = identity(models[0])
    models[1].lm_head.weight.data[3, 4] *= -1
    for model, bits, group_size in zip(models[:4], (4, 4, 8, 4), (32, 32, 32, 64), strict=True):
        quantize_weights(model, bits, group_size)
    *made, loaded = map(identity, models)
    assert differing(made[0], plain) == {"weights"}
    assert loaded == made[0]
    assert len({each.fields["weights"] for each in made}) == 4


@pytest.mark.parametrize(("family", "bits"), [("mixtral", None), ("qwen3_moe", 4)])
def test_host_experts_are_told_by_their_numbers(family: str, bits: int | None):
    models = [expert_model(family) for _ in range(3)]
    [*_, last] = (weight for weight in models[2].parameters() if weight.dim() == 3)
    last.data[1, 2, 3] += 1
    for model in models:
        move_experts_to_host(model, bits=bits)
    first, second, third = map(identity, models)
    assert first == second
    assert differing(third, first) == {"weights"}


class Coded(nn.Parameter):
    pass


class Packed(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)


REFUSED: dict[str, Callable[[Any], Any]] = {
    r"model\.eval\(\)": lambda model: model.model.layers[1].train(),
    "dynamic": turned(rope_type="dynamic", factor=2.0),
    "lm_head.weight is not in memory but on meta": lambda model: model.lm_head.to("meta"),
    "lm_head.weight is a Coded": lambda model: model.lm_head._parameters.update(weight=Coded(up(model).detach())),
    "torch.sparse_coo": lambda model: setattr(model.lm_head, "weight", nn.Parameter(up(model).detach().to_sparse())),
    "lm_head._extra_state is no parameter": lambda model: setattr(model, "lm_head", Packed(64, 128, False).eval()),
    "on meta, as with accelerate": lambda model: cpu_offload(model, torch.device("cpu")),
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_model_whose_states_cannot_be_told_is_refused_by_any_name(told: str):
    with pytest.raises(ModelIdentityError, match=told):
        identity(changed(new_llama(), REFUSED[told]), "a name")
