"""Plans: fitting caches, their longest contexts, the recommendation, and its lines of Python."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hybrid_cache import HybridCache, cache_for_budget
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import (
    Machine,
    Measured,
    Plan,
    PlanError,
    make_plans,
    model_cost,
    recommended,
)
from hf_hybrid_cache.planning.candidates import (
    BITS,
    RUNTIME_BYTES,
    Candidate,
    Strategy,
    cpu_candidates,
    expert_candidates,
    gpu_candidates,
)
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan, recommendations
from hf_hybrid_cache.scalars import parse_bytes, parse_tokens
from hf_hybrid_cache.weights import WEIGHT_BITS

from models.expert_models import expert_model
from models.tiny_models import FAMILIES, random_prompt, tiny_model

GIB = 2**30
PLENTY = Machine(2**45, 2**45)
# A card that has no room for all keys and values of a long context.
CARD = Machine(5 * GIB, 64 * GIB)


@pytest.fixture(scope="module")
def llama() -> ModelCost:
    return model_cost(load_config("meta-llama/Llama-3.2-1B"))


# Fitting caches


def test_a_plan_fits_from_its_bytes_on_and_up_to_its_longest_context(llama: ModelCost):
    limits, candidates = set(), [*gpu_candidates(llama, 8192, 2**45), *cpu_candidates(llama)]
    for candidate in {each.strategy: each for each in candidates}.values():
        needed = make_plan(llama, candidate, 8192, PLENTY)
        less = make_plan(llama, candidate, 8192, Machine(needed.device_bytes - 3, needed.host_bytes - 5))
        assert needed.fits
        assert not less.fits
        assert (less.short_device_bytes, less.short_host_bytes) == (3, 5)
        assert less.longest_context < 8192
        exact = Machine(needed.device_bytes, needed.host_bytes)
        longest = make_plan(llama, candidate, 8192, exact).longest_context
        assert longest >= 8192
        assert make_plan(llama, candidate, longest, exact).fits
        if longest < llama.max_context:
            more = make_plan(llama, candidate, longest + 1, exact)
            assert not more.fits
            limits |= {name for name in ("short_device_bytes", "short_host_bytes") if getattr(more, name)}
    assert limits == {"short_device_bytes", "short_host_bytes"}
    with pytest.raises(PlanError, match="a context of 131,072 tokens, and 131,073 were asked for"):
        make_plan(llama, candidate, 131_073, PLENTY)


def test_weights_count_where_the_model_decodes(llama: ModelCost):
    for plan in make_plans(llama, 1000, PLENTY):
        if plan.weights is None:
            assert plan.device_bytes > llama.weight_bytes + RUNTIME_BYTES
            assert plan.host_bytes < llama.weight_bytes
    assert all(plan.device_bytes == 0 for plan in make_plans(llama, 1000, Machine(0, 2**45)))


ON_GPU = set(Strategy) - {Strategy.CPU, Strategy.BOTH}


@pytest.mark.parametrize(
    ("family", "gib", "context", "expected", "of_few_bits", "best"),
    [
        # No room for the weights, for a long cache; no layer is ours; no kernel.
        ("llama", 2, 500, {Strategy.CPU}, {Strategy.CPU}, Strategy.CPU),
        ("llama", 3, 131_072, set(Strategy) - {Strategy.BOTH}, {Strategy.CPU}, Strategy.CPU),
        ("llama", 4, 500, ON_GPU, set(), Strategy.GPU),
        ("mistral_sliding", 2**15, 500, {Strategy.GPU}, set(), Strategy.GPU),
        ("deepseek_v3", 2**15, 500, ON_GPU - {Strategy.CPU_ATTENTION}, set(), Strategy.GPU),
    ],
)
def test_only_what_a_gpu_and_a_model_can_do_is_planned(
    llama: ModelCost,
    family: str,
    gib: int,
    context: int,
    expected: set[Strategy],
    of_few_bits: set[Strategy],
    best: Strategy,
):
    model = llama if family == "llama" else model_cost(FAMILIES[family]())
    plans = make_plans(model, context, Machine(gib * GIB, 2**45))
    as_they_are = [plan for plan in plans if plan.weights is None and not plan.experts_on_host]
    assert {plan.strategy for plan in as_they_are} == expected
    assert {plan.strategy for plan in plans if plan.weights is not None and not plan.experts_on_host} == of_few_bits
    assert recommended(as_they_are).strategy == best
    assert (recommended(as_they_are).cache == "stock") == (family == "mistral_sliding")


def test_windows_alone_on_the_cpu_are_planned_in_full_precision():
    model = model_cost(FAMILIES["mistral_sliding"]())
    assert {plan.cache for plan in make_plans(model, 500, Machine(0, 2**45))} == {"stock", "dynamic"}


@pytest.mark.parametrize("cache", ["offloaded", "quantized-4-2"])
def test_divided_caches_have_as_many_tokens_on_the_gpu_as_fit(llama: ModelCost, cache: str):
    def divided(device_bytes: int) -> list[Candidate]:
        found = gpu_candidates(llama, 131_072, device_bytes)
        return [each for each in found if (each.cache, each.strategy) == (cache, Strategy.BOTH)]

    (found,) = divided(CARD.device_bytes)
    taken, with_many_more = (
        make_plan(llama, replace(found, device_tokens=tokens), 131_072, CARD).device_bytes
        for tokens in (found.device_tokens, found.device_tokens + 16_384)
    )
    assert 0.9 * CARD.device_bytes < taken <= CARD.device_bytes < with_many_more
    # All fits, or too little.
    assert divided(80 * GIB) == divided(3 * GIB) == []


# Recommendations


def plan_with(cache: str, seconds: float | None, short: int = 0, weights: int | None = None) -> Plan:
    """Return a plan that was measured, unless there are no `seconds`; an offloaded one is streamed."""
    strategy = Strategy.STREAMED if cache == "offloaded" else Strategy.GPU
    measured = None if seconds is None else Measured(1.0, seconds, 2)
    sizes = dict.fromkeys(["device_bytes", "host_bytes", "kv_device_bytes", "kv_host_bytes", "longest_context"], 1)
    short_of = {"short_device_bytes": short, "short_host_bytes": 0}
    return Plan(
        cache=cache, strategy=strategy, weights=weights, context=1, code="", measured=measured, **sizes, **short_of
    )


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        # The best quality that fits, and of that the fastest; 8 bits only where they are much faster.
        ([("stock", 1.0), ("dynamic", 3.0), ("quantized-8", 2.1)], [1, 2]),
        ([("dynamic", 3.0), ("offloaded", 2.0), ("dynamic", 4.0)], [1]),
        ([("dynamic", 1.0, 5), ("quantized-2", 2.0), ("quantized-4", 4.0), ("quantized-4", 3.0)], [3]),
        ([("stock", 1.0, 1)], []),
        # Beside full precision 8 and 4 bits are named, and 2 bits never.
        ([("dynamic", 3.0), ("quantized-8", 2.1), ("quantized-4", 1.0), ("quantized-2", 0.1)], [0, 1, 2]),
        ([("dynamic", 3.1), ("dynamic", 2.5, 0, 8), ("quantized-8", 2.0, 0, 8), ("dynamic", 1.0, 0, 4)], [2, 0, 3]),
        # Without measuring, the fewest transfers.
        ([("offloaded", None), ("dynamic", None), ("quantized-8", None), ("quantized-4", None)], [1, 2, 3]),
        ([("quantized-4-2", 1.0), ("quantized-2", 1.0, 0, 8)], []),
    ],
)
def test_the_best_quality_that_fits_comes_first_and_then_the_fastest(plans: list[tuple], chosen: list[int]):
    made = [plan_with(*plan) for plan in plans]
    assert [made.index(plan) for plan in recommendations(made)] == chosen
    assert recommended(made) is (made[chosen[0]] if chosen else None)


# Weights of few bits


def on_cpu(model: ModelCost, weights: int | None, context: int = 8192, host_bytes: int = 2**45) -> Plan:
    return make_plan(model, Candidate("dynamic", Strategy.CPU, weights), context, Machine(0, host_bytes))


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_weights_of_few_bits_are_coded_while_they_are_loaded_and_take_less(llama: ModelCost, bits: int):
    quantized = llama.quantized_weights[bits]
    loading = quantized.num_bytes + quantized.largest_matrix_bytes + RUNTIME_BYTES
    saved = llama.weight_bytes - quantized.num_bytes
    plain, few = on_cpu(llama, None), on_cpu(llama, bits)
    assert few.host_bytes == max(loading, plain.host_bytes - saved)
    # At a context where the cache is large, all that is saved is.
    assert on_cpu(llama, None, 131_072).host_bytes - on_cpu(llama, bits, 131_072).host_bytes == saved


def test_files_that_are_quantized_otherwise_are_loaded_as_they_are_first(llama: ModelCost):
    plan = on_cpu(replace(llama, comes_quantized=True), 4)
    assert plan.host_bytes > llama.weight_bytes
    assert "quantize_weights(model, 4)" in plan.code
    assert "quantization_config=QuantizedWeightsConfig(bits=4)" in on_cpu(llama, 4).code


def test_quantized_weights_are_recommended_only_where_they_are_needed(llama: ModelCost):
    plenty = recommendations(make_plans(llama, 131_072, Machine(0, 2**45)))
    assert [(plan.cache, plan.weights) for plan in plenty] == [
        ("dynamic", None),
        ("quantized-8", 8),
        ("quantized-4", 4),
    ]
    least = make_plan(llama, Candidate("quantized-4", Strategy.CPU, 4), 131_072, PLENTY).host_bytes
    assert recommended(make_plans(llama, 131_072, Machine(0, least))).weights == 4
    assert recommended(make_plans(llama, 131_072, Machine(0, least - 1))) is None


# The lines of Python


def bits_of(cache: HybridCache) -> int | tuple[int, int] | None:
    """The bits of all quantized layers of a cache."""
    (bits,) = {(codec.keys.bits, codec.values.bits) for codec in cache.codecs.values()} or {(None, None)}
    return bits[0] if bits[0] == bits[1] else bits


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_the_lines_of_every_plan_run(family: str, tmp_path: Path):
    has_experts = family == "olmoe"
    model = expert_model(family) if has_experts else tiny_model(family)
    model.save_pretrained(tmp_path)
    cost = model_cost(AutoModelForCausalLM.from_pretrained(tmp_path).config, chunk=64)
    inputs = {"input_ids": random_prompt(1, 140), "attention_mask": torch.ones(1, 140, dtype=torch.long)}
    plain = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    candidates = expert_candidates(cost, 500, 2**40)[::3]
    assert bool(candidates) == has_experts
    for candidate in candidates or [*gpu_candidates(cost, 500, 2**40), *cpu_candidates(cost)]:
        code, names = candidate.program(cost), {"inputs": inputs}
        assert code.count('move_experts_to_host(model)\nmodel.to("cuda")\ncache = ') == has_experts
        code = code.replace('device_map="cuda"', 'device_map="cpu"').replace('model.to("cuda")', "")
        exec(code.replace("model.generate", "result = model.generate").replace("=200", "=4"), names)
        cache, result = names["cache"], names["result"]
        assert result.shape == (1, 144)
        assert cache.get_seq_length() == 143
        if isinstance(cache, HybridCache):
            assert bits_of(cache) == BITS.get(candidate.cache)
        if BITS.get(candidate.cache) is None and candidate.weights is None:
            assert torch.equal(result, plain)
        if candidate.strategy == Strategy.CPU:
            is_quantized = type(names["model"].get_input_embeddings().weight) is not torch.nn.Parameter
            assert is_quantized == (candidate.weights is not None)


# A cache for a budget


@pytest.mark.usefixtures("short_prompts_choose")
def test_a_cache_for_a_budget_is_the_one_that_loses_least():
    config, model = tiny_model("llama").config, model_cost(tiny_model("llama").config)
    needed = {
        bits: make_plan(model, Candidate(name, Strategy.CPU), 500, PLENTY).host_bytes for name, bits in BITS.items()
    }
    for bits in (None, 8, 4):
        assert bits_of(cache_for_budget(config, 500, gpu_memory=0, host_memory=needed[bits])) == bits
    with pytest.raises(PlanError, match=r"(?s)2 bits .* often change .*QuantizedHybridCache\(model.config, bits=2\)"):
        cache_for_budget(config, 500, 0, needed[2])
    with pytest.raises(PlanError):  # more tokens of a prompt at once need more
        cache_for_budget(config, 500, 0, needed[None], prefill_chunk_size=100_000)
    # All of this machine's free memory is far more than a tiny model needs.
    assert bits_of(cache_for_budget(config, 500, batch_size=4)) is None


@pytest.mark.parametrize(
    ("context", "memory", "message"),
    [
        (
            50_000,
            ("4GiB", "64GiB"),
            r"is short of .* of GPU memory, and has no room for a single .* pass gpu_memory=0\.",
        ),
        (50_000, (0, "4GiB"), r"is short of 4\.0 GiB of host memory, and has no room"),
        (50_000, (0, "7GiB"), r"quantized-2, on the CPU, is short of .* and goes up to \d"),
        ("4 KiB", (0, "64GiB"), "'4 KiB' is not a number of tokens: write it as 131072 or 128K"),
    ],
)
def test_a_budget_that_is_too_small_says_by_how_much_and_the_way_out(context: int | str, memory: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        cache_for_budget(load_config("meta-llama/Llama-3.2-3B"), context, *memory)


# Sizes, of which tests/fuzz/test_sizes.py tries any


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_bytes, ("", "GiB", "-1GiB", "8 bytes", "8PiB", "1e9", "8iB", "1,000", "8GiB/s", "nan")),
        (parse_tokens, ("0", "", "-5", "1.5K", "128 KiB")),
    ],
)
def test_what_is_no_size_is_quoted(parse: Callable[..., float], texts: tuple[str, ...]):
    for text in texts:
        with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not a "):
            parse(text)
