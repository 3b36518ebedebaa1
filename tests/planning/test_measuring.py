"""Measured plans: a clock that counts operations agrees with the whole model; what cannot be measured says why."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.decode_step import fuse_where_known
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Machine, MeasureError, make_plans, measured_plans, measuring, model_cost
from hf_hybrid_cache.planning.candidates import Candidate, Strategy
from hf_hybrid_cache.planning.measuring import measure
from hf_hybrid_cache.planning.plans import recommendations

from common.caches import stock
from models.tiny_models import FAMILIES, random_prompt, tiny_model

CHUNK, CONTEXT = 64, 320
WARM_UP_STEPS = 2


class Clock(TorchFunctionMode):
    """A clock that only goes on with products and attention, by their operations."""

    now = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            self.now += args[0].numel() * args[1].shape[0]
        elif func is scaled_dot_product_attention:
            query, keys, values = args[:3]
            self.now += query.shape[:3].numel() * keys.shape[2] * (keys.shape[3] + values.shape[3])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(measuring, "_LEAST_BYTES", 1)  # so that as few layers run as may
    return clock


@torch.no_grad()
def operations_of_the_whole(family: str, candidate: Candidate, clock: Clock) -> tuple[float, float]:
    """Return the operations of a prompt, and of a step after all tokens and as many steps as warm up."""
    model = tiny_model(family)
    is_stock = candidate.cache == "stock"
    cache = stock(model.config) if is_stock else HybridCache(model.config, candidate.placement, codec=candidate.codec)

    def read(num_tokens: int) -> float:
        before = clock.now
        model(random_prompt(1, num_tokens), **cache_argument(cache), logits_to_keep=1)
        return clock.now - before

    with clock, fuse_where_known(model):
        of_prompt = sum(read(CHUNK) for _ in range(0, CONTEXT, CHUNK))
        steps = [read(1) for _ in range(WARM_UP_STEPS + 1)]
    return of_prompt, steps[-1]


@pytest.mark.parametrize(
    ("family", "candidate"),
    [
        ("llama", Candidate("stock", Strategy.CPU)),
        ("gemma3", Candidate("quantized-8", Strategy.CPU)),
        ("qwen3_next", Candidate("quantized-4", Strategy.CPU)),
        ("deepseek_v3", Candidate("dynamic", Strategy.CPU)),
        ("mistral_sliding", Candidate("dynamic", Strategy.CPU)),
    ],
)
def test_some_layers_when_operations_count_then_take_what_all_take(family: str, candidate: Candidate, clock: Clock):
    config = FAMILIES[family]()
    cost = model_cost(config, torch.float32, chunk=CHUNK)
    with clock:
        measured = measure(config, cost, candidate, CONTEXT)
    of_prompt, of_step = operations_of_the_whole(family, candidate, clock)
    # The first chunk of a sliding layer has no tokens before it.
    has_windows = family in ("gemma3", "mistral_sliding")
    assert measured.seconds_to_first_token == pytest.approx(of_prompt, rel=0.03 if has_windows else 1e-9)
    assert measured.seconds_per_token == pytest.approx(of_step, rel=1e-9)
    assert measured.layers == (2 if family in ("gemma3", "qwen3_next") else 1)  # as many as the kinds repeat after


def test_decode_steps_when_the_model_is_known_then_run_in_one_call(clock: Clock):
    """The clock does not see what runs there."""
    config = FAMILIES["llama"]()
    with clock:
        measured = measure(config, model_cost(config, torch.float32), Candidate("dynamic", Strategy.CPU), CONTEXT)
    assert not measured.seconds_per_token


@pytest.mark.usefixtures("short_prompts_choose")
def test_the_best_of_each_precision_when_asked_for_then_is_measured():
    config, told = FAMILIES["llama"](), []
    cost = model_cost(config, torch.bfloat16, chunk=CHUNK)
    plans = measured_plans(config, cost, make_plans(cost, CONTEXT, Machine(0, 2**40)), told.append)
    found = [plan for plan in plans if plan.measured is not None]
    assert [replace(plan, measured=None) for plan in found] == told
    assert [(plan.cache, plan.weights) for plan in found] == [("dynamic", None), ("quantized-8", 8), ("quantized-4", 4)]
    assert {id(plan) for plan in recommendations(plans)} == set(map(id, found))
    assert all(min(plan.measured.seconds_to_first_token, plan.measured.seconds_per_token) > 0 for plan in found)


def test_a_plan_when_there_is_no_room_then_is_refused_with_numbers():
    config = load_config("meta-llama/Llama-3.2-1B")
    cost = model_cost(config, batch=100_000)
    message = r"131,072 tokens of meta-llama/Llama-3\.2-1B with dynamic, on the CPU, need 0\.0 GiB of GPU memory"
    with pytest.raises(MeasureError, match=message):
        measure(config, cost, Candidate("dynamic", Strategy.CPU), 131_072)


def test_layers_when_others_give_them_keys_and_values_then_are_refused(clock: Clock):
    config = FAMILIES["gemma4_shared"]()
    with pytest.raises(MeasureError, match="Layers of Gemma4TextConfig do not run alone, so do not measure: "):
        measure(config, model_cost(config, torch.float32), Candidate("dynamic", Strategy.CPU), CONTEXT)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_plan_for_a_gpu_when_there_is_none_then_is_refused():
    config = FAMILIES["llama"]()
    with pytest.raises(MeasureError, match=r"no GPU that torch can use\. Measure on the machine that has one"):
        measure(config, model_cost(config), Candidate("offloaded", Strategy.STREAMED), CONTEXT)
