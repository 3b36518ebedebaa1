"""The cost of experts: bytes against real models, and plans."""

from collections.abc import Callable

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
from hf_hybrid_cache.planning import Machine, make_plans, model_cost, recommended
from hf_hybrid_cache.planning.candidates import RUNTIME_BYTES, Candidate, Strategy
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan
from hf_hybrid_cache.weights import WEIGHT_BITS, Width, coverage

from common.slow import slow
from models.expert_models import CHOICES, EXPERT_FAMILIES, NUM_EXPERTS
from models.tiny_models import COMMON

CHUNK = 64
LAYERS, EXPERTS, CHOSEN = 3, NUM_EXPERTS, CHOICES
SIZES = COMMON | {"num_hidden_layers": LAYERS}
# And those whose configs have other names for the numbers of experts, or matrices that are too small for few bits.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = EXPERT_FAMILIES | {
    "small": lambda: MixtralConfig(
        **SIZES | {"intermediate_size": 8}, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    ),
    "hunyuan_moe": lambda: HunYuanMoEV1Config(**SIZES, num_experts=EXPERTS, moe_topk=[CHOSEN] * LAYERS),
    "gemma4_moe": lambda: Gemma4TextConfig(
        **SIZES, enable_moe_block=True, num_experts=EXPERTS, top_k_experts=CHOSEN, moe_intermediate_size=32,
        layer_types=["full_attention"] * LAYERS, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        num_global_key_value_heads=2, global_head_dim=16,
    ),
}  # fmt: skip
OLMOE = "allenai/OLMoE-1B-7B-0924"
# Billions of weights that the makers state.
BILLIONS = {
    OLMOE: 6.9,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "openai/gpt-oss-20b": 20.9,
    "deepseek-ai/DeepSeek-V3": 671.0,
}


def cost_of(family: str, batch: int = 1) -> ModelCost:
    return model_cost(FAMILIES[family](), torch.bfloat16, batch, CHUNK)


def expert_matrices(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Matrices of experts; what holds them is called so in all of these families."""
    return [weight for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]


def quantized_bytes(model: PreTrainedModel, bits: int) -> int:
    """Bytes of the stacked matrices in few bits, and of those that cannot be quantized as they are."""
    stacked = {id(each.parameter): each for each in coverage(model)[0]}
    matrices = [(stacked.get(id(each)), each.nbytes) for each in expert_matrices(model)]
    return sum(each.quantized_bytes(Width.checked(bits)) if each else as_it_is for each, as_it_is in matrices)


# Bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_count_as_in_the_real_model(family: str):
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.bfloat16)
    cost, matrices = cost_of(family), expert_matrices(model)
    total = sum(matrix.nbytes for matrix in matrices)
    layers = {name.partition(".experts.")[0] for name, _ in model.named_parameters() if ".experts." in name}
    assert cost.experts.largest_bytes == total // (EXPERTS * len(layers))
    assert cost.experts.total_bytes() == total
    assert model_cost(FAMILIES[family](), torch.float32).experts.total_bytes() == 2 * total
    assert cost.without_experts().weight_bytes == sum(weight.nbytes for weight in model.parameters()) - total
    for bits in WEIGHT_BITS:
        assert cost.experts.total_bytes(bits) == quantized_bytes(model, bits)


@pytest.mark.parametrize(
    ("name", "stated"),
    [case if case[0] == OLMOE else slow(*case) for case in BILLIONS.items()],
)
def test_built_in_mixtures_have_the_weights_that_their_makers_state(name: str, stated: float):
    config = load_config(name)
    cost = model_cost(config)
    # DeepSeek-V3's routers are in float32 since transformers 5.24.
    assert cost.weight_bytes / 2e9 == pytest.approx(stated, abs=0.05, rel=3e-4)


# Plans with experts in host memory


@pytest.mark.parametrize(("family", "bits"), [("deepseek_v3", None), ("gpt_oss", 8), ("qwen3_next", 4)])
def test_experts_take_host_memory_and_others_that_of_the_gpu(family: str, bits: int | None):
    model, plenty = cost_of(family), Machine(2**45, 2**45)
    candidate = Candidate("dynamic", Strategy.GPU, bits, experts_on_host=True)
    plan, of_experts = make_plan(model, candidate, 512, plenty), model.experts.total_bytes()
    slots = 2 * model.experts.largest_bytes
    all_there = make_plan(model, Candidate("dynamic", Strategy.GPU), 512, plenty)
    assert all_there.device_bytes - plan.device_bytes == of_experts - slots
    kept = model.experts.total_bytes(bits) + RUNTIME_BYTES
    largest = model.quantized_weights[bits].largest_matrix_bytes if bits else 0
    assert plan.host_bytes == kept + max(model.least_working_bytes, model.weight_bytes - of_experts + largest)


def test_experts_are_on_the_host_where_only_all_else_fits_the_gpu():
    model, host = model_cost(load_config(OLMOE)), 128 * 2**30
    plans = make_plans(model, 2048, Machine(4 * 2**30, host))
    assert {(plan.experts_on_host, plan.weights) for plan in plans} == {(True, bits) for bits in (None, *WEIGHT_BITS)}
    best = recommended(plans)
    assert (best.cache, best.strategy, best.experts_on_host, best.weights) == ("dynamic", Strategy.GPU, True, None)
    for device_bytes in (0, 2**30):
        without_room = make_plans(model, 2048, Machine(device_bytes, host))
        assert not any(plan.experts_on_host for plan in without_room)
        assert {plan.strategy for plan in without_room} == {Strategy.CPU}
    plenty = make_plans(cost_of("mixtral"), 512, Machine(2**40, 2**40))
    assert not recommended(plenty).experts_on_host
    assert any(plan.experts_on_host for plan in plenty)
