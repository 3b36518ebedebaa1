"""Plans: every cache with the memory that it needs, its speed and its longest context; the recommended one."""

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ..errors import HybridCacheError
from ..storage import available_host_bytes
from ..weights import WEIGHT_BITS
from .candidates import BITS, RUNTIME_BYTES, Candidate, cpu_candidates, expert_candidates, gpu_candidates
from .divided import divided_candidates
from .expert_prediction import seconds_per_token_with_experts, seconds_to_first_token_with_experts
from .machine import Machine, Speeds, SpeedsFileError, free_device_bytes, load_speeds
from .model_cost import ModelCost, model_cost
from .prediction import Strategy, seconds_of_division, seconds_per_token, seconds_to_first_token

_OF_FEW_BITS = "quantized-8", "quantized-4"
_OF_2_BITS = "quantized-4-2", "quantized-2"


class PlanError(HybridCacheError, ValueError):
    """There is no plan for the request; the message gives the numbers."""


@dataclass(frozen=True)
class Plan:
    """
    The plan for one cache on one machine at one context length.

    Attributes:
        cache: its name.
        strategy: where keys and values are, and whether GPU or CPU computes attention and decodes.
        context: number of tokens of each sequence, prompt and answer.
        device_bytes: the most GPU memory that is used at any time, weights included.
        host_bytes: the most host memory that is used at any time, weights included.
        kv_device_bytes: GPU memory of the cache while it decodes, as `memory()` reports it.
        kv_host_bytes: host memory of the cache while it decodes.
        short_device_bytes: GPU memory that is missing.
        short_host_bytes: host memory that is missing.
        seconds_per_token: of a decode step at the end of the context; `None` where speeds are not known, and where
            several sequences continue a prompt.
        seconds_to_first_token: of the prompt, which is as long as the context unless several sequences continue it;
            `None` where speeds are not known.
        longest_context: the longest context that fits, at most the model's; 0 if none does.
        code: Python program that uses the cache.
        weights: bits of the weights that the CPU multiplies; `None` for the weights as they are.
        experts_on_host: the experts are in host memory and the CPU computes them; the rest of the model is on the GPU.
    """

    cache: str
    strategy: Strategy
    context: int
    device_bytes: int
    host_bytes: int
    kv_device_bytes: int
    kv_host_bytes: int
    short_device_bytes: int
    short_host_bytes: int
    seconds_per_token: float | None
    seconds_to_first_token: float | None
    longest_context: int
    code: str
    weights: int | None = None
    experts_on_host: bool = False

    @property
    def fits(self) -> bool:
        """Whether no memory is missing."""
        return self.short_device_bytes == self.short_host_bytes == 0

    @property
    def cache_line(self) -> str:
        """The line of `code` that makes the cache."""
        return next(line for line in self.code.splitlines() if line.startswith("cache = "))

    @property
    def weights_lost(self) -> int:
        """The rank of the loss of precision of the weights; 0 for weights as they are."""
        return 0 if self.weights is None else 1 + WEIGHT_BITS.index(self.weights)

    def is_faster_than(self, other: "Plan", times: float = 1.0) -> bool:
        """Whether a token is more than `times` faster than with the other plan; an unknown speed is the slowest."""
        if self.seconds_per_token is None:
            return False
        return other.seconds_per_token is None or times * self.seconds_per_token < other.seconds_per_token


def make_plan(model: ModelCost, candidate: Candidate, context: int, machine: Machine) -> Plan:
    """
    Plan for one cache.

    Raises:
        PlanError: the context is longer than the model's.
    """
    if context > model.max_context:
        raise PlanError(f"{model.name} has a context of {model.max_context:,} tokens, and {context:,} were asked for.")
    cost = candidate.cost(model, context)
    most = candidate.most(model, cost, context)
    is_continued = model.continuations > 1
    read = model.prompt_tokens(context)
    speed_name = "dynamic" if candidate.cache == "offloaded" else candidate.cache
    arguments = model, cost, speed_name, candidate.strategy, machine.speeds
    if candidate.experts_on_host:
        seconds = seconds_per_token_with_experts(*arguments, candidate.weights)
        first = seconds_to_first_token_with_experts(*arguments, read, candidate.weights)
    else:
        if candidate.strategy == Strategy.BOTH:
            division = candidate.division(model, context)
            seconds = seconds_of_division(model, cost, speed_name, division, machine.speeds)
        else:
            seconds = seconds_per_token(*arguments, candidate.weights)
        first = seconds_to_first_token(*arguments, read, candidate.weights)
    return Plan(
        cache=candidate.cache,
        strategy=candidate.strategy,
        context=context,
        device_bytes=most.device,
        host_bytes=most.host,
        kv_device_bytes=cost.decode.device,
        kv_host_bytes=cost.decode.host,
        short_device_bytes=max(0, most.device - machine.device_bytes),
        short_host_bytes=max(0, most.host - machine.host_bytes),
        # Rows that share a prompt are bound by arithmetic, which was not measured.
        seconds_per_token=None if is_continued else seconds,
        seconds_to_first_token=first,
        longest_context=_longest_context(model, candidate, machine),
        code=candidate.code(model),
        weights=candidate.weights,
        experts_on_host=candidate.experts_on_host,
    )


def make_plans(model: ModelCost, context: int, machine: Machine) -> list[Plan]:
    """
    Plan for every cache that there is.

    There are plans with the model on the GPU if the GPU has room for the weights, plans with the experts in host memory
    if it has room for the other weights, and plans with the model on the CPU if none of these fits with the weights as
    they are.

    Args:
        model: cost of the model, from `model_cost`.
        context: number of tokens of each sequence.
        machine: memory and speeds, as from `this_machine`.

    Raises:
        PlanError: the context is longer than the model's.
    """
    plans = []
    if has_room(model, machine):
        divided = divided_candidates(model, context, machine) if model.continuations == 1 else []
        candidates = [*gpu_candidates(model), *divided]
        plans = [make_plan(model, candidate, context, machine) for candidate in candidates]
    if has_room(model.without_experts(), machine):
        plans += [make_plan(model, candidate, context, machine) for candidate in expert_candidates(model)]
    if recommended([plan for plan in plans if plan.weights is None]) is None:
        plans += [make_plan(model, candidate, context, machine) for candidate in cpu_candidates(model)]
    return plans


def has_room(model: ModelCost, machine: Machine) -> bool:
    """Whether the GPU has room for the weights and a chunk of a prompt."""
    return _bytes_without_a_cache(model) <= machine.device_bytes


def _bytes_without_a_cache(model: ModelCost) -> int:
    """Bytes of the weights, the process and a chunk of a prompt."""
    return model.weight_bytes + RUNTIME_BYTES + model.least_working_bytes


def predict(
    config: PreTrainedConfig,
    cache: str,
    context: int,
    machine: Machine,
    dtype: torch.dtype | None = None,
    batch: int = 1,
    chunk: int = 512,
) -> Plan:
    """
    Plan for one cache by name, with the model on the GPU, or on the CPU if the machine has no GPU.

    Args:
        config: of the model.
        cache: "stock", "offloaded" or one of `BITS`.
        context: number of tokens of each sequence.
        machine: memory and speeds.
        dtype: of weights, keys and values; `None` for the config's, or bfloat16 if it has none.
        batch: number of sequences.
        chunk: number of tokens in one forward pass of the prefill.

    Raises:
        CostError: the cost of the model cannot be computed.
        PlanError: there is no such cache, or the context is longer than the model's.
    """
    if cache not in ("stock", "offloaded", *BITS):
        raise PlanError(f"{cache!r} is not one of stock, offloaded, {', '.join(BITS)}.")
    on_gpu = Strategy.STREAMED if cache == "offloaded" else Strategy.GPU
    candidate = Candidate(cache, on_gpu if machine.device_bytes else Strategy.CPU)
    return make_plan(model_cost(config, dtype, batch, chunk), candidate, context, machine)


def recommendations(plans: Sequence[Plan]) -> list[Plan]:
    """
    The recommended plans, the best first.

    They are the fastest fitting plans with keys and values in full precision, in 8 and in 4 bits. Where speeds are not
    known, the plan with the fewest transfers is taken. All of them have the most precise weights that fit. Full
    precision comes first, unless a token takes less than half the time with 8 bits. 2 bits are never recommended,
    because they often change an answer. transformers' own cache is recommended only for a model that gains nothing from
    a `HybridCache`.
    """
    ours = [plan for plan in plans if plan.cache != "stock"] or plans
    fitting = [plan for plan in ours if plan.fits and plan.cache not in _OF_2_BITS]
    least = min((plan.weights_lost for plan in fitting), default=0)
    best: dict[str, Plan] = {}
    for plan in fitting:
        bits = plan.cache if plan.cache in _OF_FEW_BITS else "full precision"
        if plan.weights_lost == least and (bits not in best or plan.is_faster_than(best[bits])):
            best[bits] = plan
    found = [best[bits] for bits in ("full precision", *_OF_FEW_BITS) if bits in best]
    if len(found) > 1 and found[1].cache == "quantized-8" and found[1].is_faster_than(found[0], times=2):
        found[:2] = found[1::-1]
    return found


def recommended(plans: Sequence[Plan]) -> Plan | None:
    """The best plan that fits and keeps at least 4 bits of keys and values; `None` if there is none."""
    return next(iter(recommendations(plans)), None)


def with_2_bits(plans: Sequence[Plan]) -> Plan | None:
    """The first fitting plan with keys or values of 2 bits, which is never recommended."""
    return next((plan for plan in plans if plan.fits and plan.cache in _OF_2_BITS), None)


def much_faster(plans: Sequence[Plan], best: Plan) -> Plan | None:
    """The plan `best` with weights of the fewest bits, if a token then takes less than half the time."""
    fewest = min(WEIGHT_BITS)
    for plan in plans:
        which = plan.cache, plan.strategy, plan.experts_on_host, plan.weights
        is_same = which == (best.cache, best.strategy, best.experts_on_host, fewest)
        if is_same and plan.fits and plan.seconds_per_token is not None and best.seconds_per_token is not None:
            return plan if plan.is_faster_than(best, times=2) else None
    return None


def farthest(plans: Sequence[Plan]) -> Plan:
    """The plan with the longest context that fits."""
    return max(plans, key=lambda plan: plan.longest_context)


def missing_for_weights(model: ModelCost, memory_bytes: int) -> str | None:
    """A clause that says what is missing for the weights, the process and a chunk of a prompt; `None` if they fit."""
    needed = _bytes_without_a_cache(model)
    if needed <= memory_bytes:
        return None
    return (
        f"Without any cache, weights, process and a chunk of the prompt take {needed / 2**30:.1f} GiB, "
        f"{(needed - memory_bytes) / 2**30:.1f} GiB more than there are"
    )


def choose(
    config: PreTrainedConfig,
    context: int,
    device_bytes: int | None,
    host_bytes: int | None,
    batch: int = 1,
    chunk: int = 512,
) -> Candidate:
    """
    Choose the recommended cache for a model that is loaded, by the speeds measured on this machine.

    Args:
        config: of the model, which is on the GPU if `device_bytes` is more than 0.
        context: number of tokens of each sequence.
        device_bytes: GPU memory for weights and cache; `None` for the free memory and that of the loaded weights.
        host_bytes: host memory; `None` for the free memory, and that of the loaded weights if they are there.
        batch: number of sequences.
        chunk: number of tokens in one forward pass of the prefill.

    Raises:
        CostError: the cost of the model cannot be computed.
        PlanError: nothing fits, or the context is longer than the model's.
    """
    model = model_cost(config, None, batch, chunk)
    if device_bytes is None:
        free_bytes = free_device_bytes()
        device_bytes = free_bytes and free_bytes + model.weight_bytes
    if host_bytes is None:
        host_bytes = available_host_bytes() + (0 if device_bytes else model.weight_bytes)
    try:
        speeds = load_speeds(model.dtype)
    except SpeedsFileError as error:
        warnings.warn(str(error), stacklevel=4)
        speeds = Speeds()
    machine = Machine(device_bytes, host_bytes, speeds)
    candidates = cpu_candidates(model)
    if device_bytes:
        candidates = [*gpu_candidates(model), *divided_candidates(model, context, machine)]
    # The weights are loaded already, so neither their place nor their bits can change.
    taken = [each for each in candidates if each.strategy != Strategy.CPU_DECODE and each.weights is None]
    plans = [make_plan(model, each, context, machine) for each in taken]
    best = recommended(plans)
    if best is None:
        if smaller := with_2_bits(plans):
            raise PlanError(
                f"{context:,} tokens of {model.name} fit only with 2 bits ({smaller.cache}, {smaller.strategy}), which "
                f"often change an answer. Use a shorter context, or pass the cache yourself: {smaller.cache_line}"
            )
        nearest = farthest(plans)
        sizes = {"GPU": nearest.short_device_bytes, "host": nearest.short_host_bytes}
        short = " and ".join(f"{size / 2**30:.1f} GiB of {where} memory" for where, size in sizes.items() if size)
        if missing := missing_for_weights(model, device_bytes or host_bytes):
            where = "GPU" if device_bytes else "host"
            on_cpu = device_bytes and missing_for_weights(model, host_bytes) is None
            otherwise = "load the model on the CPU and pass gpu_memory=0" if on_cpu else "use a smaller model"
            raise PlanError(
                f"{model.name} does not fit: its weights take {model.weight_bytes / 2**30:.1f} GiB, and there are "
                f"{(device_bytes or host_bytes) / 2**30:.1f} GiB of {where} memory. {missing}: {otherwise}."
            )
        otherwise = ", or load the model on the CPU and pass gpu_memory=0" if device_bytes else ""
        raise PlanError(
            f"{context:,} tokens of {model.name} fit with no cache: {nearest.cache}, {nearest.strategy}, is short of "
            f"{short} and goes up to {nearest.longest_context:,} tokens. Use a shorter context{otherwise}."
        )
    return taken[plans.index(best)]


def _longest_context(model: ModelCost, candidate: Candidate, machine: Machine) -> int:
    """The longest context that fits; the memory that is needed grows with the context."""

    def does_not_fit(context: int) -> bool:
        most = candidate.most(model, candidate.cost(model, context), context)
        return most.device > machine.device_bytes or most.host > machine.host_bytes

    longest = model.max_context
    return bisect_left(range(1, longest), True, key=does_not_fit) if does_not_fit(longest) else longest
