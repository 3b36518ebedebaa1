"""The cost of experts: bytes against real models, expected numbers against random choices, and plans."""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    HunYuanMoEV1Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Machine, Plan, Speeds, make_plans, model_cost, recommended
from hf_hybrid_cache.planning.candidates import RUNTIME_BYTES, Candidate, Strategy, expert_candidates
from hf_hybrid_cache.planning.experts import LayerExperts
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan
from hf_hybrid_cache.weights import WEIGHT_BITS, Width, coverage

from common.slow import slow
from models.expert_models import CHOICES, EXPERT_FAMILIES, NUM_EXPERTS
from models.tiny_models import COMMON

CHUNK = 64
LAYERS, EXPERTS, CHOSEN = 3, NUM_EXPERTS, CHOICES
SIZES = COMMON | {"num_hidden_layers": LAYERS}
# And those whose configs have other names for the numbers of experts.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = EXPERT_FAMILIES | {
    "hunyuan_moe": lambda: HunYuanMoEV1Config(**SIZES, num_experts=EXPERTS, moe_topk=[CHOSEN] * LAYERS),
    "gemma4_moe": lambda: Gemma4TextConfig(
        **SIZES, enable_moe_block=True, num_experts=EXPERTS, top_k_experts=CHOSEN, moe_intermediate_size=32,
        layer_types=["full_attention"] * LAYERS, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        num_global_key_value_heads=2, global_head_dim=16,
    ),
}  # fmt: skip
# Billions of weights that the makers state: all of them, and those of one token.
BILLIONS = {
    "allenai/OLMoE-1B-7B-0924": (6.9, 1.3),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "openai/gpt-oss-20b": (20.9, 3.6),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, 12.9),
    "deepseek-ai/DeepSeek-V3": (671.0, 37.0),
}


def cost_of(family: str, batch: int = 1) -> ModelCost:
    return model_cost(FAMILIES[family](), torch.bfloat16, batch, CHUNK)


@functools.cache
def real_model(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.bfloat16).eval()


def stacked(model: PreTrainedModel) -> dict[int, torch.nn.Parameter]:
    """Matrices of experts, by `id`; what holds them is called so in all of these families."""
    return {id(weight): weight for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3}


def expert_weights(family: str) -> int:
    return sum(matrix.numel() for matrix in stacked(real_model(family)).values())


# Bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_count_as_in_the_real_model(family: str):
    model, cost = real_model(family), cost_of(family)
    matrices, weights = stacked(model), expert_weights(family)
    assert {(layer.count, layer.chosen) for layer in cost.experts.layers} == {(EXPERTS, CHOSEN)}
    assert cost.experts.total_bytes() == sum(matrix.nbytes for matrix in matrices.values())
    assert cost.experts.read_bytes(1) == pytest.approx(2 * weights * CHOSEN / EXPERTS)
    assert cost.experts.token_flops == pytest.approx(2 * weights * CHOSEN / EXPERTS)
    assert model_cost(FAMILIES[family](), torch.float32).experts.total_bytes() == 4 * weights
    others = sum(weight.nbytes for weight in model.parameters() if id(weight) not in matrices)
    assert cost.without_experts().weight_bytes == others
    for bits in WEIGHT_BITS:
        covered = [each for each in coverage(model)[0] if id(each.parameter) in matrices]
        assert len(covered) == len(matrices)
        assert cost.experts.total_bytes(bits) == sum(each.quantized_bytes(Width.checked(bits)) for each in covered)


def test_experts_that_are_too_small_for_few_bits_count_as_they_are():
    config = MixtralConfig(**SIZES | {"intermediate_size": 8}, num_local_experts=4, num_experts_per_tok=2)
    cost = model_cost(config, torch.bfloat16, chunk=CHUNK)
    down = LAYERS * 4 * 64 * 8 * 2
    covered = [each for each in coverage(AutoModelForCausalLM.from_config(config))[0] if each.parameter.dim() == 3]
    assert cost.experts.total_bytes(4) == down + sum(each.quantized_bytes(Width.checked(4)) for each in covered)


def test_experts_cost_when_model_is_dense_then_is_empty():
    cost = model_cost(load_config("HuggingFaceTB/SmolLM2-135M"), chunk=CHUNK)
    assert cost.experts.layers == ()
    assert cost.experts.total_bytes() == cost.experts.read_bytes(100) == 0
    assert cost.without_experts() == cost
    assert expert_candidates(cost, 512, 2**40) == []


# Experts that are read


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (32, 4), (64, 8), (128, 8)])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 100])
def test_distinct_experts_are_as_many_as_choices_at_random_have(count: int, chosen: int, num_tokens: int):
    generator = np.random.default_rng(0)
    drawn = np.argsort(generator.random((500, num_tokens, count)), axis=-1)[..., :chosen]
    found = np.array([len(np.unique(experts)) for experts in drawn])
    expected = count * LayerExperts(count, chosen, 1, {}).share_read(num_tokens)
    assert expected == pytest.approx(found.mean(), abs=1e-3 + 5 * found.std() / np.sqrt(len(found)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_several_tokens_reads_what_any_of_them_chooses(family: str):
    one, five = cost_of(family), cost_of(family, batch=5)
    share = 1 - (1 - CHOSEN / EXPERTS) ** 5
    assert five.experts.read_bytes(5) == pytest.approx(share * five.experts.total_bytes(), abs=2)
    # All else is read once, and each token is multiplied with as many experts as before.
    assert five.token_flops == pytest.approx(5 * one.token_flops)
    for batch, cost in ((1, one), (5, five)):
        rest = cost.without_experts()
        assert rest.weight_bytes + cost.experts.total_bytes() == cost.weight_bytes
        assert rest.step_weight_bytes == pytest.approx(one.without_experts().step_weight_bytes, abs=1)
        assert rest.step_weight_bytes + cost.experts.read_bytes(batch) == pytest.approx(cost.step_weight_bytes, abs=1)
        assert rest.token_flops + batch * cost.experts.token_flops == pytest.approx(cost.token_flops)
    for bits in WEIGHT_BITS:
        few = [cost.quantized_weights[bits].step_bytes for cost in (one, five)]
        expected = five.experts.read_bytes(5, bits) - one.experts.read_bytes(1, bits)
        assert few[1] - few[0] == pytest.approx(expected, abs=2 * LAYERS + 1)


@pytest.mark.parametrize(
    ("name", "stated"),
    [case if case[0] == "openai/gpt-oss-20b" else slow(*case) for case in BILLIONS.items()],
)
def test_built_in_mixtures_when_counted_then_match_published_weights(name: str, stated: tuple[float, float]):
    config = load_config(name)
    cost = model_cost(config)
    total, of_a_token = stated
    # DeepSeek-V3's routers are in float32 since transformers 5.24.
    assert cost.weight_bytes / 2e9 == pytest.approx(total, abs=0.05, rel=3e-4)
    # Some makers count the embedding of tokens, of which one row is read.
    multiplied, embedding = cost.step_weight_bytes / 2e9, config.vocab_size * config.hidden_size / 1e9
    assert multiplied - 0.05 <= of_a_token <= multiplied + embedding + 0.05


# Plans with experts in host memory


def planned(
    model: ModelCost, bits: int | None, speeds: Speeds | None = None, strategy: Strategy = Strategy.GPU
) -> Plan:
    cache = "offloaded" if strategy == Strategy.STREAMED else "dynamic"
    machine = Machine(2**45, 2**45, speeds or Speeds())
    return make_plan(model, Candidate(cache, strategy, bits, experts_on_host=True), 512, machine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, *WEIGHT_BITS])
def test_experts_take_host_memory_and_others_that_of_the_gpu(family: str, bits: int | None):
    model = cost_of(family)
    plan = planned(model, bits)
    all_there = make_plan(model, Candidate("dynamic", Strategy.GPU), 512, Machine(2**45, 2**45))
    slots = 2 * model.experts.total_bytes() // (EXPERTS * len(model.experts.layers))
    assert all_there.device_bytes - plan.device_bytes == model.experts.total_bytes() - slots
    candidate = Candidate("dynamic", Strategy.GPU, bits, experts_on_host=True)
    running = candidate.running(model, candidate.cost(model, 512), 512)
    assert running.host == model.experts.total_bytes(bits) + RUNTIME_BYTES + model.least_working_bytes
    loading = model.weight_bytes - model.experts.total_bytes() + model.experts.total_bytes(bits) + RUNTIME_BYTES
    loading += model.quantized_weights[bits].largest_matrix_bytes if bits else 0
    assert plan.host_bytes == max(running.host, loading)


def test_experts_when_gpu_has_room_for_all_else_then_are_in_host_memory():
    model = model_cost(load_config("mistralai/Mixtral-8x7B-v0.1"))
    plans = make_plans(model, 8192, Machine(8 * 2**30, 128 * 2**30))
    assert {(plan.experts_on_host, plan.weights) for plan in plans} == {(True, bits) for bits in (None, *WEIGHT_BITS)}
    best = recommended(plans)
    assert best is not None
    assert (best.cache, best.strategy, best.experts_on_host, best.weights) == ("dynamic", Strategy.GPU, True, None)
    without_gpu = make_plans(model, 8192, Machine(0, 128 * 2**30))
    assert {plan.strategy for plan in without_gpu} == {Strategy.CPU}
    assert not any(plan.experts_on_host for plan in without_gpu)
    too_small = make_plans(model, 8192, Machine(3 * 2**30, 128 * 2**30))
    assert not any(plan.experts_on_host for plan in too_small)


def test_experts_when_everything_fits_the_gpu_then_stay_there():
    plans = make_plans(cost_of("mixtral"), 512, Machine(2**40, 2**40))
    best = recommended(plans)
    assert best is not None
    assert not best.experts_on_host
    assert any(plan.experts_on_host for plan in plans)


# Speeds


@pytest.mark.parametrize("bits", [None, *WEIGHT_BITS])
@pytest.mark.parametrize("batch", [1, 5])
def test_token_seconds_when_experts_on_host_then_sum_those_of_both_places(bits: int | None, batch: int):
    model = cost_of("qwen3_moe", batch=batch)
    states = LAYERS * 2 * 2 * 16 * 2 * 512 * batch
    fast, slow = Speeds(1e9, 1e12, 1e10, 1e13, 2e9), Speeds(5e8, 1e12, 1e10, 1e13, 2e9)
    seconds = [planned(model, bits, speeds).seconds_per_token for speeds in (fast, slow)]
    # Of the bandwidth of host memory, only the time of experts depends.
    of_experts = model.experts.read_bytes(batch, bits) / 1e9
    assert of_experts <= seconds[1] - seconds[0] <= 2.5 * of_experts
    on_gpu = (model.without_experts().step_weight_bytes + states) / 1e10
    assert 2 * seconds[0] - seconds[1] - on_gpu == pytest.approx(LAYERS * 5e-4)
    assert planned(model, bits, fast, Strategy.CPU_ATTENTION).seconds_per_token > seconds[0]


def test_prediction_when_a_speed_is_unknown_then_is_none():
    model = cost_of("qwen3_moe")
    all_known = Speeds(1e9, 1e12, 1e10, 1e13, 2e9)
    plan = planned(model, None, all_known)
    assert plan.seconds_per_token
    assert plan.seconds_to_first_token
    for unknown in ("host_bandwidth", "gpu_bandwidth"):
        assert planned(model, None, replace(all_known, **{unknown: None})).seconds_per_token is None
    for unknown in ("host_flops", "gpu_flops"):
        assert planned(model, None, replace(all_known, **{unknown: None})).seconds_to_first_token is None
    streamed = planned(model, None, replace(all_known, bus_bandwidth=None), Strategy.STREAMED)
    assert streamed.seconds_per_token is streamed.seconds_to_first_token is None
    # Attention with sinks, and latent attention.
    for family in ("gpt_oss", "deepseek_v3"):
        assert planned(cost_of(family), None, all_known).seconds_per_token is None


# The lines of Python


def test_the_lines_move_the_experts_before_the_model_goes_to_the_gpu():
    model = cost_of("olmoe")
    for candidate in expert_candidates(model, 512, 2**40):
        lines = candidate.code(model).splitlines()
        loaded = next(index for index, line in enumerate(lines) if line.startswith("model = "))
        quantized = f"quantization_config=QuantizedWeightsConfig(bits={candidate.weights}, only_experts=True)"
        assert 'device_map="cpu"' in lines[loaded]
        assert (quantized in lines[loaded]) == (candidate.weights is not None)
        assert lines[loaded + 1 : loaded + 3] == ["move_experts_to_host(model)", 'model.to("cuda")']
        assert lines[loaded + 3].startswith("cache = ")
        (imported,) = [line for line in lines if line.startswith("from hf_hybrid_cache import ")]
        assert imported.endswith("move_experts_to_host")
        compile("\n".join(lines), "lines", "exec")
