"""Plans: every cache with the memory that it needs and its longest context, measured if asked; the recommended one."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from ..cache import HybridCache
from ..cache.construction import require_config
from ..errors import HybridCacheError
from ..layers import checked_count
from ..scalars import parse_bytes, parse_tokens
from .candidates import (
    BITS,
    RUNTIME_BYTES,
    Candidate,
    Machine,
    Strategy,
    cpu_candidates,
    expert_candidates,
    gpu_candidates,
    this_machine,
)
from .measuring import Measured, measure
from .model_cost import ModelCost, model_cost

# Ranks of what is lost by bits; fewer than 4 bits often change an answer, and are never recommended.
_LOSS: dict[int | tuple[int, int] | None, int] = {None: 0, 8: 1, 4: 2}
_TOO_MUCH = 3
# How much faster 8 bits, which hardly ever change an answer, must be measured to come before full precision.
_MUCH_FASTER = 1.5


class PlanError(HybridCacheError, ValueError):
    """There is no plan for the request; the message gives the numbers."""


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """
    The plan for a candidate on one machine at one context length.

    Attributes:
        context: number of tokens of each sequence, prompt and answer.
        device_bytes: the most GPU memory that is used at any time, weights included.
        host_bytes: the most host memory that is used at any time, weights included.
        kv_device_bytes: GPU memory of the cache while it decodes, as `memory()` reports it.
        kv_host_bytes: host memory of the cache while it decodes.
        short_device_bytes: GPU memory that is missing.
        short_host_bytes: host memory that is missing.
        longest_context: the longest context that fits, at most the model's; 0 if none does.
        code: Python program that uses the cache.
        measured: its speed; `None` unless it was measured.
    """

    context: int
    device_bytes: int
    host_bytes: int
    kv_device_bytes: int
    kv_host_bytes: int
    short_device_bytes: int
    short_host_bytes: int
    longest_context: int
    code: str
    measured: Measured | None = None

    @property
    def fits(self) -> bool:
        """Whether no memory is missing."""
        return self.short_device_bytes == self.short_host_bytes == 0

    @property
    def loss(self) -> int:
        """The rank of what is lost, 0 for full precision, then 8 bits, 4 bits, and fewer, of weights or the cache."""
        return max(_LOSS.get(bits, _TOO_MUCH) for bits in (self.weights, BITS.get(self.cache)))

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of plans, the better one first, by measured seconds of a token, then transfers, then bytes."""
        seconds = math.inf if self.measured is None else self.measured.seconds_per_token
        transfers = self.strategy == Strategy.CPU, self.experts_on_host, [*Strategy].index(self.strategy)
        most, kv = self.device_bytes + self.host_bytes, self.kv_device_bytes + self.kv_host_bytes
        return seconds, *transfers, most, kv


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
    return Plan(
        **vars(candidate),
        context=context,
        device_bytes=most.device,
        host_bytes=most.host,
        kv_device_bytes=cost.decode.device,
        kv_host_bytes=cost.decode.host,
        short_device_bytes=max(0, most.device - machine.device_bytes),
        short_host_bytes=max(0, most.host - machine.host_bytes),
        longest_context=_longest_context(model, candidate, machine),
        code=candidate.program(model),
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
        machine: its memory, as from `this_machine`.

    Raises:
        PlanError: the context is longer than the model's.
    """
    candidates: list[Candidate] = []
    if _bytes_without_a_cache(model) <= machine.device_bytes:
        candidates += gpu_candidates(model, context, machine.device_bytes)
    if _bytes_without_a_cache(model.without_experts()) <= machine.device_bytes:
        candidates += expert_candidates(model, context, machine.device_bytes)
    plans = [make_plan(model, each, context, machine) for each in candidates]
    if recommended([plan for plan in plans if plan.weights is None]) is None:
        plans += [make_plan(model, each, context, machine) for each in cpu_candidates(model)]
    return plans


def _bytes_without_a_cache(model: ModelCost) -> int:
    """Bytes of the weights, the process and a chunk of a prompt."""
    return model.weight_bytes + RUNTIME_BYTES + model.least_working_bytes


def recommendations(plans: Sequence[Plan]) -> list[Plan]:
    """
    The recommended plans, the best first.

    They are the best fitting plans in full precision, in 8 and in 4 bits, of the weights that the CPU multiplies and of
    keys and values: the fastest of those that were measured, or else the one with the fewest transfers, then with the
    fewest bytes. Full precision comes first, unless 8 bits are measured to be more than 1.5 times as fast a token.
    transformers' own cache is recommended only for a model that gains nothing from a `HybridCache`.
    """
    by_loss = _worth_taking(plans)
    found = [min(by_loss[loss], key=lambda plan: plan.rank) for loss in sorted(by_loss)]
    if len(found) > 1 and found[1].loss == 1 and _MUCH_FASTER * found[1].rank[0] < found[0].rank[0]:
        found[:2] = found[1::-1]
    return found


def measured_plans(
    config: PreTrainedConfig, model: ModelCost, plans: Sequence[Plan], progress: Callable[[Plan], None] | None = None
) -> list[Plan]:
    """
    Measure the plans that may be recommended, on this machine: it takes some 20 seconds for each on a CPU.

    These are, of each strategy in full precision, in 8 and in 4 bits, those with the fewest bytes. Nothing is measured
    beside a plan on the GPU, where nothing moves.

    Args:
        config: of the model.
        model: its cost.
        plans: from `make_plans`.
        progress: is called with each plan before it is measured.

    Returns:
        All plans; those that were measured say so.

    Raises:
        MeasureError: the machine has no such device or too little memory, or layers of the model do not run alone.
    """
    made = list(plans)
    for of_loss in _worth_taking(plans).values():
        of_strategies: dict[Strategy, Plan] = {}
        for plan in sorted(of_loss, key=lambda plan: plan.rank):
            of_strategies.setdefault(plan.strategy, plan)
        on_gpu = [plan for plan in of_strategies.values() if plan.strategy == Strategy.GPU and not plan.experts_on_host]
        for plan in on_gpu or of_strategies.values():
            if progress is not None:
                progress(plan)
            made[made.index(plan)] = replace(plan, measured=measure(config, model, plan, plan.context))
    return made


def _worth_taking(plans: Sequence[Plan]) -> dict[int, list[Plan]]:
    """The plans that fit and do not lose too much, by what they lose."""
    found = defaultdict(list)
    for plan in [plan for plan in plans if plan.cache != "stock"] or plans:
        if plan.fits and plan.loss < _TOO_MUCH:
            found[plan.loss].append(plan)
    return found


def recommended(plans: Sequence[Plan]) -> Plan | None:
    """The best plan that fits and keeps at least 4 bits of weights, keys and values; `None` if there is none."""
    return next(iter(recommendations(plans)), None)


def why_nothing_fits(model: ModelCost, plans: Sequence[Plan]) -> str:
    """Sentences that say what is missing where no plan is recommended, and what would fit."""
    if smaller := next((plan for plan in plans if plan.fits and plan.loss == _TOO_MUCH), None):
        return (
            f"{smaller.context:,} tokens of {model.name} fit only with 2 bits ({smaller.cache}, {smaller.strategy}), "
            f"which often change an answer. Use a shorter context, or make the cache yourself:\n\n{smaller.code}"
        )
    nearest = max(plans, key=lambda plan: (plan.longest_context, -plan.short_device_bytes - plan.short_host_bytes))
    sizes = {"GPU": nearest.short_device_bytes, "host": nearest.short_host_bytes}
    short = " and ".join(f"{size / 2**30:.1f} GiB of {where} memory" for where, size in sizes.items() if size)
    way_out = "has no room for a single token. Use a smaller model, or more memory."
    if nearest.longest_context:
        way_out = f"goes up to {nearest.longest_context:,} tokens. Use a shorter context."
    return (
        f"{nearest.context:,} tokens of {model.name} do not fit: {nearest.cache}, {nearest.strategy}, is short of "
        f"{short}, and {way_out}"
    )


def cache_for_budget(
    config: PreTrainedConfig,
    context: int | str,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch_size: int = 1,
    prefill_chunk_size: int = 512,
) -> HybridCache:
    """
    Make the cache that loses least and needs the fewest transfers, of those that fit beside a model that is loaded.

    Args:
        config: the model's config (`model.config`).
        context: tokens, prompt and answer, as a number or as text such as "64K".
        gpu_memory: for weights, cache and all, in bytes or as text such as "8GiB"; 0 if the model is on the CPU;
            `None` for what is free now, with the model loaded.
        host_memory: likewise.
        batch_size: sequences at once, beams included.
        prefill_chunk_size: tokens of the prompt per forward pass; pass the same to `generate`.

    Raises:
        TypeError: `config` is not a transformers config.
        ValueError: a number or a size is not one; or nothing fits, and the message says what is short and which
            context would fit.

    Example:
        >>> cache = cache_for_budget(model.config, "64K", gpu_memory="8GiB", host_memory="32GiB")
        >>> model.generate(**inputs, cache=cache, prefill_chunk_size=512)
    """
    require_config(config)
    tokens = parse_tokens(context) if isinstance(context, str) else context
    counts = {"context": tokens, "batch_size": batch_size, "prefill_chunk_size": prefill_chunk_size}
    context, batch_size, chunk = (checked_count(*each) for each in counts.items())
    model = model_cost(config, None, batch_size, chunk)
    given = [None if each is None else parse_bytes(each) for each in (gpu_memory, host_memory)]
    free = this_machine(given[0], given[1])
    # What is free is beside the weights, which are on the GPU if there is memory.
    device_bytes = free.device_bytes + (model.weight_bytes if gpu_memory is None and free.device_bytes else 0)
    host_bytes = free.host_bytes + (model.weight_bytes if host_memory is None and not device_bytes else 0)
    machine = Machine(device_bytes, host_bytes)
    candidates = gpu_candidates(model, context, device_bytes) if device_bytes else cpu_candidates(model)
    # The weights are loaded already, so neither their place nor their bits can change.
    plans = [make_plan(model, each, context, machine) for each in candidates if each.weights is None]
    best = recommended(plans)
    if best is None:
        otherwise = " Or load the model on the CPU, and pass gpu_memory=0." if device_bytes else ""
        raise PlanError(why_nothing_fits(model, plans) + otherwise)
    return HybridCache(config, best.placement, codec=best.codec)


def _longest_context(model: ModelCost, candidate: Candidate, machine: Machine) -> int:
    """The longest context that fits; the memory that is needed grows with the context."""

    def does_not_fit(context: int) -> bool:
        most = candidate.most(model, candidate.cost(model, context), context)
        return most.device > machine.device_bytes or most.host > machine.host_bytes

    longest = model.max_context
    return bisect_left(range(1, longest), True, key=does_not_fit) if does_not_fit(longest) else longest
