"""Every plan for an accelerator is measured on it."""

import pytest
import torch

from hf_hybrid_cache.planning import Machine, make_plans, measured_plans, model_cost
from hf_hybrid_cache.planning.candidates import Candidate, Strategy
from hf_hybrid_cache.planning.measuring import measure
from hf_hybrid_cache.planning.model_cost import ModelCost

from models.expert_models import EXPERT_FAMILIES
from models.tiny_models import FAMILIES

CHUNK, CONTEXT = 64, 300


def cost_of(config) -> ModelCost:
    return model_cost(config, torch.float32, chunk=CHUNK)


@pytest.mark.default("values")
@pytest.mark.parametrize("strategy", sorted(set(Strategy) - {Strategy.CPU}))
@pytest.mark.parametrize("cache", ["offloaded", "quantized-4"])
def test_layers_on_the_device_when_run_then_take_time(cache: str, strategy: Strategy):
    config, device_tokens = FAMILIES["llama"](), 128 if strategy == Strategy.BOTH else 0
    measured = measure(config, cost_of(config), Candidate(cache, strategy, None, device_tokens), CONTEXT)
    assert min(measured.seconds_to_first_token, measured.seconds_per_token) > 0


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_with_experts_on_the_host_when_run_then_take_time(bits: int | None):
    config = EXPERT_FAMILIES["qwen3_moe"]()
    candidate = Candidate("dynamic", Strategy.GPU, bits, experts_on_host=True)
    assert measure(config, cost_of(config), candidate, CONTEXT).seconds_per_token > 0


def test_plans_when_one_is_on_the_gpu_then_no_other_is_measured():
    config, told = FAMILIES["llama"](), []
    plans = measured_plans(
        config, cost_of(config), make_plans(cost_of(config), CONTEXT, Machine(2**40, 2**40)), told.append
    )
    assert [(plan.cache, plan.strategy) for plan in told] == [
        ("dynamic", Strategy.GPU),
        ("quantized-8", Strategy.GPU),
        ("quantized-4", Strategy.GPU),
    ]
    assert sum(plan.measured is not None for plan in plans) == 3
