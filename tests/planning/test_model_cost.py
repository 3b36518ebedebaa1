"""The cost of a model, against real models of every family, and against arithmetic by hand."""

import copy
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import ModelLoadError, load_config
from hf_hybrid_cache.models.shapes import SHAPES
from hf_hybrid_cache.planning import CostError, model_cost
from hf_hybrid_cache.weights import WEIGHT_BITS

from common.programs import wait_for_compilation
from models.tiny_models import COMMON, FAMILIES, random_prompt, tiny_model

CHUNK = 64
# Millions of weights that the Hub states for these models.
MILLIONS_OF_WEIGHTS = {
    "meta-llama/Llama-3.2-1B": 1236,
    "meta-llama/Llama-3.1-8B": 8030,
    "Qwen/Qwen3-0.6B": 596,
    "mistralai/Mistral-7B-v0.3": 7248,
    "google/gemma-3-1b-it": 1000,
    "microsoft/Phi-4-mini-instruct": 3836,
    "HuggingFaceTB/SmolLM2-135M": 135,
}


def llama(**sizes: object) -> LlamaConfig:
    return LlamaConfig(**COMMON | {"num_hidden_layers": 2} | sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_states_are_those_of_the_real_model(family: str):
    cost, model = model_cost(FAMILIES[family](), torch.bfloat16, 2, CHUNK), tiny_model(family, torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(random_prompt(2, 5), **cache_argument(cache))
    full = {i: layer for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer and layer.is_initialized}
    assert cost.weight_bytes == sum(weight.nbytes for weight in model.parameters())
    assert {index: (shape.keys, shape.values, shape.key_dtype) for index, shape in cost.shapes.items()} == {
        i: (*((*states.shape[:2], states.shape[3]) for states in (layer.keys, layer.values)), layer.keys.dtype)
        for i, layer in full.items()
    }
    for bits in WEIGHT_BITS:
        report, quantized = quantize_weights(copy.deepcopy(model), bits), cost.quantized_weights[bits]
        assert quantized.num_bytes == report.quantized_bytes + report.other_bytes
        assert cost.weight_bytes == report.original_bytes + report.other_bytes
        assert 0 < quantized.largest_matrix_bytes <= report.quantized_bytes * 16 / bits


def test_the_memory_of_a_chunk_has_the_mask_and_repeated_keys_and_values():
    cost = model_cost(llama(max_position_embeddings=4096), torch.bfloat16, chunk=CHUNK)
    _, slope = cost.working_bytes_line
    assert slope == CHUNK + 2 * 4 * 16 * 2
    assert cost.working_bytes(4000) - cost.working_bytes(3000) == 1000 * slope
    assert cost.working_bytes(1) == cost.least_working_bytes > 0


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mistral_sliding"}))
def test_the_kernel_attends_where_attention_is_over_the_states_themselves(family: str):
    assert model_cost(FAMILIES[family](), chunk=CHUNK).has_kernel == (family != "deepseek_v3")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="this transformers leaves soft-capping out with sdpa"
)
def test_soft_capping_is_not_what_the_kernel_computes():
    assert not model_cost(Gemma2Config(**COMMON, num_hidden_layers=2)).has_kernel


def test_weights_of_gigabytes_take_no_memory():
    wait_for_compilation()
    before = psutil.Process().memory_info().rss
    cost = model_cost(load_config("meta-llama/Llama-3.2-1B"), chunk=48)  # as no other test, or it would be known
    assert cost.weight_bytes == 2 * 1_235_814_400
    assert psutil.Process().memory_info().rss - before < 2**28


def test_an_equal_model_costs_what_it_did_and_any_other_is_computed():
    config = llama()
    cost = model_cost(config, torch.bfloat16, chunk=CHUNK)
    assert model_cost(copy.deepcopy(config), torch.bfloat16, 1, CHUNK) is cost
    for dtype, batch, chunk in ((torch.float32, 1, CHUNK), (torch.bfloat16, 2, CHUNK), (torch.bfloat16, 1, 2 * CHUNK)):
        other = model_cost(config, dtype, batch, chunk)
        assert (other.dtype, other.batch, other.chunk) == (dtype, batch, chunk)
    config._attn_implementation = "eager"
    assert not model_cost(config, torch.bfloat16, chunk=CHUNK).has_kernel


def test_a_model_whose_code_looks_at_data_is_refused_by_name():
    config = LlamaConfig(
        num_hidden_layers=1, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    config.name_or_path = "some/model"
    with pytest.raises(CostError, match="What some/model costs cannot be worked out without its weights"):
        model_cost(config)


@pytest.mark.parametrize(("name", "millions"), MILLIONS_OF_WEIGHTS.items())
def test_built_in_shapes_have_as_many_weights_as_the_models(name: str, millions: int):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name))
    assert round(model.num_parameters() / 1e6) == millions


def test_built_in_shapes_are_found_in_any_case_unless_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in SHAPES:
        assert (
            load_config(name.upper()).name_or_path == load_config(name.partition("/")[2].upper()).name_or_path == name
        )
    assert load_config("smollm2-135m").name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load_config("llama-3.2-1b-random").name_or_path == "meta-llama/Llama-3.2-1B"
    monkeypatch.chdir(tmp_path)
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "Qwen3-30B-A3B")
    for folder in ("Qwen3-30B-A3B", str(tmp_path / "Qwen3-30B-A3B")):
        config = load_config(folder)
        assert (config.num_hidden_layers, config.name_or_path) == (3, folder)
    with pytest.raises(ModelLoadError, match=r"one/two/three does not load"):
        load_config("one/two/three")
