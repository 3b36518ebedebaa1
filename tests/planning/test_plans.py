"""Plans: fitting caches, their longest contexts and speeds, the recommendation, and its lines of Python."""

import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_hybrid_cache import HybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Machine, Plan, PlanError, make_plans, model_cost, recommended
from hf_hybrid_cache.planning.candidates import BITS, RUNTIME_BYTES, Candidate, cpu_candidates, gpu_candidates
from hf_hybrid_cache.planning.machine import CacheSpeed, DeviceSpeed, Speeds, WeightSpeed, speeds_path
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan, much_faster, predict, recommendations
from hf_hybrid_cache.planning.prediction import Strategy
from hf_hybrid_cache.weights import WEIGHT_BITS

from models.tiny_models import FAMILIES, random_prompt, tiny_model

GIB = 2**30
PLENTY = Machine(2**45, 2**45)
# Reads 1 GB/s in host memory, 10 GB/s on the GPU, and 2 GB/s over the bus.
BANDWIDTHS = Speeds(DeviceSpeed(1e9), DeviceSpeed(1e10), 2e9)
# Codes of 4 bits at half of that.
QUANTIZED_SPEEDS = replace(
    BANDWIDTHS, host=DeviceSpeed(1e9, quantized_weights={8: WeightSpeed(1e9), 4: WeightSpeed(5e8)})
)


@pytest.fixture(autouse=True)
def no_measured_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def llama() -> ModelCost:
    return model_cost(load_config("meta-llama/Llama-3.2-1B"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be loaded."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def plans_of(
    model: ModelCost, context: int, machine: Machine, weights: int | None = None
) -> dict[tuple[str, str], Plan]:
    """Return the plans with weights of so many bits."""
    plans = make_plans(model, context, machine)
    return {(plan.cache, plan.strategy): plan for plan in plans if plan.weights == weights}


# Fitting caches


def test_the_longest_context_fits_and_one_token_more_does_not(llama: ModelCost):
    machine = Machine(5 * GIB, 5 * GIB)
    plans = plans_of(llama, 1000, machine)
    limits = set()
    for (cache, strategy), plan in plans.items():
        longest = plan.longest_context
        assert make_plan(llama, Candidate(cache, Strategy(strategy)), longest, machine).fits
        if longest < llama.max_context:
            more = make_plan(llama, Candidate(cache, Strategy(strategy)), longest + 1, machine)
            assert not more.fits
            limits |= {name for name in ("short_device_bytes", "short_host_bytes") if getattr(more, name)}
    assert limits == {"short_device_bytes", "short_host_bytes"}


def test_missing_bytes_when_nothing_fits_then_are_need_minus_budget(llama: ModelCost):
    for candidate in [*gpu_candidates(llama), *cpu_candidates(llama)]:
        plan = make_plan(llama, candidate, 100_000, PLENTY)
        assert plan.fits
        exact = Machine(plan.device_bytes, plan.host_bytes)
        assert make_plan(llama, candidate, 100_000, exact).fits
        less = make_plan(llama, candidate, 100_000, Machine(plan.device_bytes - 3, plan.host_bytes - 5))
        assert (less.short_device_bytes, less.short_host_bytes) == (3, 5)
        assert not less.fits


def test_weights_when_planned_then_count_where_the_model_decodes(llama: ModelCost):
    plans = plans_of(llama, 1000, PLENTY)
    for (_, strategy), plan in plans.items():
        assert plan.device_bytes > llama.weight_bytes + RUNTIME_BYTES
        assert (plan.host_bytes > llama.weight_bytes) == (strategy == Strategy.CPU_DECODE)
    on_cpu = plans_of(llama, 1000, Machine(0, 2**45))
    assert {strategy for _, strategy in on_cpu} == {Strategy.CPU}
    assert all(plan.device_bytes == 0 and plan.host_bytes > llama.weight_bytes for plan in on_cpu.values())


def test_a_gpu_without_room_for_the_weights_is_not_used(llama: ModelCost):
    assert {strategy for _, strategy in plans_of(llama, 1000, Machine(2 * GIB, 2**45))} == {Strategy.CPU}
    assert Strategy.CPU not in {strategy for _, strategy in plans_of(llama, 1000, Machine(4 * GIB, 2**45))}


def test_where_nothing_fits_the_gpu_the_cpu_is_planned_with_too(llama: ModelCost):
    machine = Machine(3 * GIB, 2**45)
    plans = plans_of(llama, 131_072, machine)
    assert {strategy for _, strategy in plans} == set(Strategy) - {Strategy.BOTH}  # speeds are not known
    best = recommended(list(plans.values()))
    assert best is not None
    assert best.strategy == Strategy.CPU


def test_without_full_attention_there_is_only_the_stock_cache():
    model = model_cost(FAMILIES["mistral_sliding"]())
    plans = plans_of(model, 500, PLENTY)
    assert list(plans) == [("stock", Strategy.GPU)]
    assert recommended(list(plans.values())) is plans["stock", Strategy.GPU]


def test_the_cpu_attends_only_where_the_kernel_can(llama: ModelCost):
    assert ("dynamic", Strategy.CPU_ATTENTION) in plans_of(llama, 500, PLENTY)
    latent = model_cost(FAMILIES["deepseek_v3"]())
    assert not any(strategy == Strategy.CPU_ATTENTION for _, strategy in plans_of(latent, 500, PLENTY))


def test_a_context_beyond_the_models_and_an_unknown_cache_are_refused(llama: ModelCost):
    with pytest.raises(PlanError, match="a context of 131,072 tokens, and 131,073 were asked for"):
        make_plan(llama, Candidate("dynamic", Strategy.GPU), 131_073, PLENTY)
    with pytest.raises(PlanError, match="'quantized-3' is not one of stock, offloaded, dynamic, quantized-8"):
        predict(FAMILIES["llama"](), "quantized-3", 100, PLENTY)


# Speeds


def test_without_speeds_nothing_is_predicted(llama: ModelCost):
    for plan in plans_of(llama, 1000, PLENTY).values():
        assert plan.seconds_per_token is plan.seconds_to_first_token is None


def test_bandwidths_alone_tell_the_time_to_read_everything_once(llama: ModelCost):
    context = 8192
    states = 16 * 2 * 8 * 64 * 2 * context
    plans = plans_of(llama, context, replace(PLENTY, speeds=BANDWIDTHS))
    seconds = {key: plan.seconds_per_token for key, plan in plans.items()}
    weights = llama.step_weight_bytes
    assert seconds["dynamic", Strategy.GPU] == pytest.approx((weights + states) / 1e10)
    # It copies before it reads.
    assert seconds["stock", Strategy.GPU] == pytest.approx((weights + 3 * states) / 1e10)
    # The bus, at 2 GB/s, takes less than the weights at 10 GB/s until there are more states.
    assert seconds["offloaded", Strategy.STREAMED] == pytest.approx((weights + states) / 1e10)
    assert plans_of(llama, 131_072, replace(PLENTY, speeds=BANDWIDTHS))[
        "offloaded", Strategy.STREAMED
    ].seconds_per_token == pytest.approx(16 * states / 2e9)
    assert seconds["dynamic", Strategy.CPU_ATTENTION] == pytest.approx(weights / 1e10 + states / 1e9)
    assert seconds["offloaded", Strategy.CPU_DECODE] == pytest.approx((weights + states) / 1e9)
    on_cpu = plans_of(llama, context, Machine(0, 2**45, BANDWIDTHS))
    assert on_cpu["dynamic", Strategy.CPU].seconds_per_token == pytest.approx((weights + states) / 1e9)


def test_measured_speeds_add_up_on_the_cpu(llama: ModelCost):
    layer = 2 * 8 * 64 * 2 * 8192
    caches = {"dynamic": CacheSpeed(((layer // 2, 0.001), (2 * layer, 0.004)), 1e12)}
    speeds = Speeds(DeviceSpeed(llama.step_weight_bytes / 0.1, 0.0005, 2e12, caches))
    plan = plans_of(llama, 8192, Machine(0, 2**45, speeds))["dynamic", Strategy.CPU]
    assert plan.seconds_per_token == pytest.approx(0.1 + 16 * (0.0005 + 0.002))
    attention = llama.attention_flops(8192) / 1e12
    assert plan.seconds_to_first_token == pytest.approx(8192 * llama.token_flops / 2e12 + attention)


def test_on_the_gpu_the_longer_of_work_and_launches_counts(llama: ModelCost):
    for layer_seconds, seconds in [(0.0, llama.step_weight_bytes / 1e12), (1.0, 16.0)]:
        speeds = Speeds(device=DeviceSpeed(1e12, layer_seconds))
        plan = plans_of(llama, 64, Machine(2**45, 2**45, speeds))["dynamic", Strategy.GPU]
        assert plan.seconds_per_token == pytest.approx(seconds, rel=0.01)


def test_a_streamed_prompt_waits_for_the_bus(llama: ModelCost):
    caches = {"dynamic": CacheSpeed(((1, 0.0), (2, 1e-9)), 1e30)}
    speeds = Speeds(device=DeviceSpeed(1e12, 0.0, 1e30, caches), bus_bytes_per_second=1e9)
    plan = plans_of(llama, 5 * 512, Machine(2**45, 2**45, speeds))["offloaded", Strategy.STREAMED]
    token_bytes = 16 * 2 * 8 * 64 * 2
    assert plan.seconds_to_first_token == pytest.approx(token_bytes * 512 * (1 + 2 + 3 + 4 + 5) / 1e9)


def test_attention_that_was_not_measured_is_not_predicted():
    model = model_cost(FAMILIES["deepseek_v3"]())
    for plan in plans_of(model, 500, replace(PLENTY, speeds=BANDWIDTHS)).values():
        assert plan.seconds_per_token is None


# Recommendations


def plan_with(cache: str, seconds: float | None, short: int = 0) -> Plan:
    return Plan(cache, Strategy.GPU, 1, 1, 1, 1, 1, short, 0, seconds, None, 1, "")


@pytest.mark.parametrize(
    ("plans", "best"),
    [
        ([("stock", 1.0, 0), ("dynamic", 3.0, 0), ("quantized-8", 2.0, 0)], 1),
        ([("dynamic", 3.0, 0), ("offloaded", 2.0, 0), ("dynamic", 4.0, 0)], 1),
        ([("dynamic", 1.0, 5), ("quantized-2", 2.0, 0), ("quantized-4", 4.0, 0), ("quantized-4", 3.0, 0)], 3),
        ([("dynamic", None, 0), ("offloaded", None, 0)], 0),
        ([("dynamic", None, 0), ("offloaded", 9.0, 0)], 1),
        ([("stock", 1.0, 0), ("dynamic", 1.0, 1)], None),
        ([("stock", 1.0, 0)], 0),
        ([("stock", 1.0, 1)], None),
    ],
)
def test_the_best_quality_that_fits_comes_first_and_then_the_fastest(plans, best):
    made = [plan_with(*plan) for plan in plans]
    assert recommended(made) is (None if best is None else made[best])


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        ([("dynamic", 3.0, 0), ("quantized-8", 2.0, 0), ("quantized-4", 1.0, 0), ("quantized-2", 0.1, 0)], [0, 1, 2]),
        ([("dynamic", 4.1, 0), ("quantized-8", 2.0, 0), ("quantized-4", 1.0, 0)], [1, 0, 2]),
        ([("dynamic", None, 0), ("offloaded", None, 0), ("quantized-8", None, 0), ("quantized-4", None, 0)], [0, 2, 3]),
        ([("dynamic", 9.0, 0), ("quantized-4", 1.0, 0)], [0, 1]),
        ([("quantized-4-2", 1.0, 0), ("quantized-2", 1.0, 0)], []),
    ],
)
def test_8_and_4_bits_are_named_beside_full_precision_and_2_bits_never(plans, chosen):
    made = [plan_with(*plan) for plan in plans]
    assert [made.index(plan) for plan in recommendations(made)] == chosen


def test_budget_when_only_2_bits_fit_then_is_refused_with_their_code(llama: ModelCost):
    config = load_config("meta-llama/Llama-3.2-1B")
    needed = make_plan(model_cost(config), Candidate("quantized-2", Strategy.CPU), 131_072, PLENTY).host_bytes
    with pytest.raises(PlanError, match=r"only with 2 bits .*QuantizedHybridCache\(model.config, bits=2\)"):
        HybridCache.for_budget(config, 131_072, 0, needed)


# Weights of few bits


def on_cpu(model: ModelCost, weights: int | None, host_bytes: int = 2**45, cache: str = "dynamic") -> Plan:
    return make_plan(model, Candidate(cache, Strategy.CPU, weights), 8192, Machine(0, host_bytes, QUANTIZED_SPEEDS))


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_weights_of_few_bits_are_coded_while_they_are_loaded_and_take_less(llama: ModelCost, bits: int):
    quantized = llama.quantized_weights[bits]
    plain, few = on_cpu(llama, None), on_cpu(llama, bits)
    loading = quantized.quantized_bytes + quantized.other_bytes + quantized.largest_matrix_bytes + RUNTIME_BYTES
    saved = llama.weight_bytes - quantized.quantized_bytes - quantized.other_bytes
    assert few.host_bytes == max(loading, plain.host_bytes - saved)
    # At a context where the cache is large, all that is saved is.
    context = 131_072
    plain, few = (make_plan(llama, Candidate("dynamic", Strategy.CPU, each), context, PLENTY) for each in (None, bits))
    assert plain.host_bytes - few.host_bytes == saved


def test_model_when_files_are_quantized_otherwise_then_loads_as_is_first(llama: ModelCost):
    plan = on_cpu(replace(llama, comes_quantized=True), 4)
    assert plan.host_bytes > llama.weight_bytes
    assert "quantize_weights(model, 4)" in plan.code
    assert "quantization_config=QuantizedWeightsConfig(bits=4)" in on_cpu(llama, 4).code


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_where_the_cpu_decodes_codes_are_beside_the_weights_that_go_back(llama: ModelCost, bits: int):
    plain, few = (
        make_plan(llama, Candidate("dynamic", Strategy.CPU_DECODE, each), 8192, PLENTY) for each in (None, bits)
    )
    assert few.host_bytes - plain.host_bytes == llama.quantized_weights[bits].quantized_bytes
    assert few.device_bytes == plain.device_bytes


def test_a_step_reads_codes_at_their_own_rate(llama: ModelCost):
    plain, few = on_cpu(llama, None), on_cpu(llama, 4)
    quantized = llama.quantized_weights[4]
    assert plain.seconds_per_token is not None
    assert few.seconds_per_token == pytest.approx(
        plain.seconds_per_token - llama.step_weight_bytes / 1e9 + quantized.step_quantized_bytes[4] / 5e8
        + (quantized.step_quantized_bytes[8] + quantized.step_other_bytes) / 1e9
    )  # fmt: skip
    decoding = make_plan(
        llama, Candidate("dynamic", Strategy.CPU_DECODE, 4), 8192, replace(PLENTY, speeds=QUANTIZED_SPEEDS)
    )
    assert decoding.seconds_per_token == pytest.approx(few.seconds_per_token)


def test_a_prompt_is_computed_with_the_weights_that_the_model_has_then(llama: ModelCost):
    caches = {"dynamic": CacheSpeed(((1, 0.0), (2, 1e-9)), 1e30)}
    host = DeviceSpeed(1e9, 0.0, 2e12, caches, {4: WeightSpeed(5e8, 1e12), 8: WeightSpeed(1e9)})
    machine = Machine(0, 2**45, Speeds(host, DeviceSpeed(1e10, 0.0, 4e12, caches), 1e30))
    first = {bits: make_plan(llama, Candidate("dynamic", Strategy.CPU, bits), 8192, machine) for bits in (None, 8, 4)}
    assert first[None].seconds_to_first_token == pytest.approx(8192 * llama.token_flops / 2e12)
    assert first[4].seconds_to_first_token == pytest.approx(8192 * llama.token_flops / 1e12)
    assert first[8].seconds_to_first_token is None
    plain, few = (
        make_plan(llama, Candidate("dynamic", Strategy.CPU_DECODE, each), 8192, machine) for each in (None, 4)
    )
    assert few.seconds_to_first_token == plain.seconds_to_first_token == pytest.approx(8192 * llama.token_flops / 4e12)


def test_without_a_rate_of_codes_nothing_is_predicted_for_them(llama: ModelCost):
    plans = make_plans(llama, 8192, Machine(0, 2**45, BANDWIDTHS))
    assert {plan.weights for plan in plans} == {None, *WEIGHT_BITS}
    assert all((plan.seconds_per_token is None) == (plan.weights is not None) for plan in plans)
    best = recommended(plans)
    assert best is not None
    assert much_faster(plans, best) is None


def test_quantized_weights_when_original_ones_fit_then_are_not_recommended(llama: ModelCost):
    def best_of(host_bytes: int) -> Plan | None:
        return recommended(make_plans(llama, 131_072, Machine(0, host_bytes, QUANTIZED_SPEEDS)))

    def needed(cache: str, weights: int | None) -> int:
        return make_plan(llama, Candidate(cache, Strategy.CPU, weights), 131_072, PLENTY).host_bytes

    plenty, least = best_of(2**45), best_of(needed("quantized-4", None))
    assert plenty is not None
    assert least is not None
    assert (plenty.cache, plenty.weights) == ("dynamic", None)
    assert (least.cache, least.weights) == ("quantized-4", None)
    few = best_of(needed("quantized-4", None) - 1)
    assert few is not None
    assert few.weights == 8
    assert best_of(needed("quantized-4", 4) - 1) is None


def test_weights_of_four_bits_are_named_where_a_step_takes_less_than_half(llama: ModelCost):
    for rate, is_much in [(1e9, True), (4e8, False)]:
        speeds = Speeds(DeviceSpeed(1e9, quantized_weights={4: WeightSpeed(rate), 8: WeightSpeed(1e9)}))
        plans = make_plans(llama, 1024, Machine(0, 2**45, speeds))
        best = recommended(plans)
        assert best is not None
        assert best.weights is None
        faster = much_faster(plans, best)
        assert (faster is not None) == is_much
        assert faster is None or (faster.cache, faster.strategy, faster.weights) == ("dynamic", Strategy.CPU, 4)


def test_a_gpu_is_left_for_the_cpu_before_weights_are_of_few_bits(llama: ModelCost):
    plans = make_plans(llama, 131_072, Machine(3 * GIB, 2**45))
    assert any(plan.strategy == Strategy.CPU and plan.weights is None for plan in plans)
    assert {plan.strategy for plan in plans if plan.weights is not None} == {Strategy.CPU, Strategy.CPU_DECODE}


# The lines of Python


@pytest.mark.parametrize("continuations", [1, 3])
def test_the_lines_of_every_plan_run(folder: Path, continuations: int):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    model = replace(model_cost(config, chunk=64), continuations=continuations)
    inputs = {"input_ids": random_prompt(1, 140), "attention_mask": torch.ones(1, 140, dtype=torch.long)}
    plain = tiny_model("llama").generate(**inputs, max_new_tokens=4)
    for candidate in [*gpu_candidates(model), *cpu_candidates(model)]:
        code = candidate.code(model).replace('device_map="cuda"', 'device_map="cpu"')
        names = {"inputs": inputs}
        exec(code.replace("model.generate", "result = model.generate").replace("=200", "=4"), names)
        cache, result = names["cache"], names["result"]
        assert result.shape == (continuations, 144)
        assert cache.get_seq_length() == 143
        if isinstance(cache, HybridCache):
            assert cache._stores.placement == candidate.placement
            assert set(cache._stores.codecs.values()) == ({candidate.codec} if candidate.codec else set())
        if BITS.get(candidate.cache) is None and candidate.weights is None and continuations == 1:
            assert torch.equal(result, plain)
        if candidate.strategy == Strategy.CPU:
            is_quantized = type(names["model"].get_input_embeddings().weight) is not torch.nn.Parameter
            assert is_quantized == (candidate.weights is not None)


@pytest.fixture(scope="module")
def real_model() -> PreTrainedModel:
    return tiny_model("llama")


def test_a_cache_for_a_budget_is_the_one_that_is_recommended(real_model: PreTrainedModel):
    prompt = random_prompt(1, 30)
    plain = real_model.generate(prompt, max_new_tokens=5, do_sample=False)
    cache = HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory="1GiB")
    assert torch.equal(real_model.generate(prompt, **cache_argument(cache), max_new_tokens=5, do_sample=False), plain)
    assert cache._stores.placement == Candidate("dynamic", Strategy.CPU).placement

    model = model_cost(real_model.config)
    resident, streamed = (make_plan(model, Candidate(*which), 500, PLENTY) for which in
                          [("dynamic", Strategy.GPU), ("offloaded", Strategy.STREAMED)])  # fmt: skip
    made = HybridCache.for_budget(real_model.config, 500, resident.device_bytes, "1GiB")
    assert made._stores.placement == Candidate("dynamic", Strategy.GPU).placement
    made = HybridCache.for_budget(real_model.config, 500, streamed.device_bytes, "1GiB")
    assert made._stores.placement == Candidate("offloaded", Strategy.STREAMED).placement


def test_budget_when_nothing_fits_then_error_tells_shortage_and_way_out(real_model: PreTrainedModel):
    with pytest.raises(
        ValueError, match=r"does not fit: .* take 0\.5 GiB, 0\.4 GiB more than there are: use a smaller"
    ):
        HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory="64MiB")
    with pytest.raises(ValueError, match=r"does not fit: .*: load the model on the CPU and pass gpu_memory=0\."):
        HybridCache.for_budget(real_model.config, 500, gpu_memory="64MiB", host_memory="1GiB")
    model = model_cost(real_model.config)
    least = model.weight_bytes + RUNTIME_BYTES + model.least_working_bytes
    with pytest.raises(
        ValueError, match=r"500 tokens of .* fit with no cache: .* GiB of host memory and goes up to \d+"
    ):
        HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory=least)
    with pytest.raises(ValueError, match="'much' is not a size in bytes"):
        HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory="much")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            {"gpu_memory": "4GiB", "host_memory": "64GiB"},
            r"weights take 6\.0 GiB, and there are 4\.0 GiB of GPU memory\. .* take 6\.6 GiB, 2\.6 GiB more than there "
            r"are: load the model on the CPU and pass gpu_memory=0\.",
        ),
        ({"gpu_memory": "4GiB", "host_memory": "4GiB"}, r"2\.6 GiB more than there are: use a smaller model\."),
        ({"gpu_memory": 0, "host_memory": "4GiB"}, r"4\.0 GiB of host memory\. .* 2\.6 GiB more than there are: use a"),
    ],
)
def test_a_budget_below_the_weights_alone_says_so_and_by_how_much(memory: dict, message: str):
    with pytest.raises(PlanError, match="meta-llama/Llama-3.2-3B does not fit: its .*" + message):
        HybridCache.for_budget(load_config("meta-llama/Llama-3.2-3B"), 50_000, **memory)


def test_a_budget_is_what_is_free_beside_the_weights_that_are_loaded(
    real_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    model = model_cost(real_model.config, batch=4)
    quantized = Candidate("quantized-4", Strategy.CPU)
    free = make_plan(model, quantized, 500, PLENTY).host_bytes - model.weight_bytes
    monkeypatch.setattr("hf_hybrid_cache.planning.plans.available_host_bytes", lambda: free)
    monkeypatch.setattr("hf_hybrid_cache.planning.plans.free_device_bytes", lambda: 0)
    cache = HybridCache.for_budget(real_model.config, 500, batch_size=4)
    assert set(cache._stores.codecs.values()) == {quantized.codec}
    on_gpu = make_plan(model, Candidate("offloaded", Strategy.STREAMED), 500, PLENTY).device_bytes - model.weight_bytes
    monkeypatch.setattr("hf_hybrid_cache.planning.plans.free_device_bytes", lambda: on_gpu)
    cache = HybridCache.for_budget(real_model.config, 500, host_memory="1GiB", batch_size=4)
    assert cache._stores.placement == Candidate("offloaded", Strategy.STREAMED).placement


def test_more_tokens_of_a_prompt_at_once_need_more(real_model: PreTrainedModel):
    model = model_cost(load_config("meta-llama/Llama-3.2-1B"), chunk=64)
    memory = make_plan(model, Candidate("dynamic", Strategy.CPU), 4096, PLENTY).host_bytes
    config = load_config("meta-llama/Llama-3.2-1B")
    cache = HybridCache.for_budget(config, 4096, 0, memory, prefill_chunk_size=64)
    assert cache._stores.codecs == {}
    with pytest.raises(PlanError):
        HybridCache.for_budget(config, 4096, 0, memory, prefill_chunk_size=2048)


def test_damaged_speeds_are_warned_of_and_not_used(real_model: PreTrainedModel):
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()  # Numba exchanges the filters of warnings meanwhile
    speeds_path().parent.mkdir()
    speeds_path().write_text("{")
    with pytest.warns(UserWarning, match="is damaged .* Measure again") as warned:
        HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory="1GiB")
    assert warned[0].filename == __file__
    speeds_path().unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HybridCache.for_budget(real_model.config, 500, gpu_memory=0, host_memory="1GiB")
