"""A cache that is divided between GPU and host memory: how, how fast, and that it is what `for_budget` gives."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_hybrid_cache
from experiments.published_machines import MACHINES
from experiments.simulated_step import layers_of, simulated_seconds
from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import (
    Candidate,
    DeviceSpeed,
    Machine,
    ModelCost,
    Speeds,
    Way,
    divided_candidates,
    make_plan,
    make_plans,
    model_cost,
    recommended,
)
from hf_hybrid_cache.planning.divided import USED_SHARE

from tiny_models import COMMON, random_prompt

GIB = 2**30
CONTEXT = 131_072
# The bus and the CPU are about as fast, and the GPU twenty times.
BALANCED = Speeds(DeviceSpeed(2.5e10), DeviceSpeed(5e11), 2.5e10, 2e-5)
CARD = Machine(5 * GIB, 64 * GIB, BALANCED)


@pytest.fixture(scope="module")
def llama() -> ModelCost:
    return model_cost(load_config("meta-llama/Llama-3.2-1B"))


def in_full_precision(model: ModelCost, context: int, machine: Machine) -> Candidate:
    (found,) = [each for each in divided_candidates(model, context, machine) if each.codec is None]
    return found


def test_as_many_tokens_are_on_the_gpu_as_fit_with_some_room_left(llama: ModelCost):
    for found in divided_candidates(llama, CONTEXT, CARD):
        least, taken, with_more = (
            make_plan(llama, replace(found, device_tokens=tokens), CONTEXT, CARD).device_bytes
            for tokens in (128, found.device_tokens, found.device_tokens + 64)
        )
        room = least + USED_SHARE * (CARD.device_bytes - least)
        assert taken <= room < with_more


@pytest.mark.parametrize(
    "machine",
    [
        Machine(5 * GIB, 64 * GIB),
        Machine(80 * GIB, 64 * GIB, BALANCED),
        Machine(3 * GIB, 64 * GIB, BALANCED),
        Machine(0, 64 * GIB, BALANCED),
    ],
    ids=["speeds are not known", "room for all", "room for too little", "no GPU"],
)
def test_nothing_is_divided_where_there_is_no_reason_to(llama: ModelCost, machine: Machine):
    assert [each for each in divided_candidates(llama, CONTEXT, machine) if each.codec is None] == []


def test_where_bus_and_cpu_are_as_fast_both_work_and_a_step_is_a_third_faster(llama: ModelCost):
    found = in_full_precision(llama, CONTEXT, CARD)
    num_layers = len(llama.shapes)
    assert num_layers / 4 <= len(found.cpu_layers) <= 3 * num_layers / 4
    times = [
        make_plan(llama, replace(found, cpu_layers=layers), CONTEXT, CARD).seconds_per_token
        for layers in (found.cpu_layers, (), tuple(llama.shapes))
    ]
    assert 1.3 * times[0] < min(times[1:])


def test_seconds_of_a_step_are_those_of_what_is_read_where_it_is(llama: ModelCost):
    """Sixteen layers, four of them streamed with three between, by hand."""
    found = replace(in_full_precision(llama, CONTEXT, CARD), cpu_layers=tuple(set(llama.shapes) - {0, 4, 8, 12}))
    token = 2 * 8 * 64 * 2
    on_host = token * (CONTEXT - found.device_tokens)
    on_both = max(on_host / 2.5e10 + 2e-5, token * found.device_tokens / 5e11)
    meanwhile = llama.step_weight_bytes / 5e11 / 4 + token * CONTEXT / 5e11 + 3 * on_both
    expected = 4 * max(on_host / 2.5e10, meanwhile)
    assert make_plan(llama, found, CONTEXT, CARD).seconds_per_token == pytest.approx(expected, rel=0.01)


def test_predictions_are_those_of_a_simulation_of_gpu_bus_and_cpu(llama: ModelCost):
    choose = random.Random(0)
    for _ in range(12):
        gpu, host, bus = (10 ** choose.uniform(*span) for span in ((11.5, 12.5), (10.3, 11.5), (10, 10.8)))
        speeds = Speeds(DeviceSpeed(host), DeviceSpeed(gpu, choose.uniform(0, 1e-4)), bus, choose.uniform(0, 1e-4))
        machine = Machine(choose.randrange(5, 7) * GIB, 64 * GIB, speeds)
        found = in_full_precision(llama, CONTEXT, machine)
        simulated = simulated_seconds(layers_of(llama, found, CONTEXT, speeds))
        assert make_plan(llama, found, CONTEXT, machine).seconds_per_token == pytest.approx(simulated, rel=0.1)


def test_on_published_machines_no_fixed_number_of_layers_is_more_than_five_percent_faster():
    model = model_cost(load_config("meta-llama/Llama-3.2-3B"))
    for published in MACHINES[:1]:
        machine = published.machine
        found = in_full_precision(model, CONTEXT, machine)
        layers = sorted(model.shapes)
        ours, *others = (
            simulated_seconds(layers_of(model, replace(found, cpu_layers=each), CONTEXT, machine.speeds))
            for each in (found.cpu_layers, *itertools.accumulate(((layer,) for layer in layers), initial=()))
        )
        assert ours <= 1.05 * min(others)


def test_what_the_planner_recommends_is_what_for_budget_makes_and_its_code_says(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = LlamaConfig(**COMMON | {"max_position_embeddings": 4096}, num_hidden_layers=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    context = 3000
    cost = model_cost(config)
    streamed, resident = (
        make_plan(cost, Candidate(*which), context, CARD).device_bytes
        for which in (("offloaded", Way.STREAMED), ("dynamic", Way.GPU))
    )
    machine = Machine((streamed + resident) // 2, GIB, BALANCED)
    monkeypatch.setattr("hf_hybrid_cache.planning.plans.load_speeds", lambda dtype: BALANCED)
    cache = HybridCache.for_budget(config, context, machine.device_bytes, "1GiB")
    placement = cache._stores.placement
    assert placement.device_tokens >= 128
    best = recommended(make_plans(cost, context, machine))
    assert (best.way, best.cache) == (Way.BOTH, "offloaded")
    line = next(line for line in best.code.splitlines() if line.startswith("cache = "))
    names = {"model": model, **{name: getattr(hf_hybrid_cache, name) for name in hf_hybrid_cache.__all__}}
    made = eval(line.removeprefix("cache = "), names)
    assert made._stores.placement == placement
    ids = random_prompt(1, 300)
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=made, max_new_tokens=5, do_sample=False), plain)
