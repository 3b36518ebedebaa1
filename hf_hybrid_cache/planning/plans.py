"""Plans: every cache with the memory that it needs, its speed and its longest context; the recommended one."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ..cache import HybridCache
from ..cache.construction import require_config
from ..errors import HybridCacheError
from ..layers import checked_count
from ..system.byte_sizes import parse_bytes, parse_tokens
from .candidates import BITS, RUNTIME_BYTES, Candidate, Strategy, cpu_candidates, expert_candidates, gpu_candidates
from .model_cost import ModelCost, model_cost
from .speeds import Machine, seconds_per_token, seconds_to_first_token, this_machine

# Ranks of what is lost by bits; fewer than 4 bits often change an answer, and are never recommended.
_LOSS: dict[int | tuple[int, int] | None, int] = {None: 0, 8: 1, 4: 2}
_TOO_MUCH = 3
# How much faster 8 bits must be, which hardly ever change an answer, to be recommended instead of full precision.
_MUCH_FASTER = 1.5


class PlanError(HybridCacheError, ValueError):
    """There is no plan for the request; the message gives the numbers."""


@dataclass(frozen=True)
class Plan:
    """
    The plan for one cache on one machine at one context length.

    Attributes:
        cache: its name.
        strategy: where keys and values are, and whether GPU or CPU computes attention and decodes.
        weights: bits of the weights that the CPU multiplies; `None` for the weights as they are.
        experts_on_host: the experts are in host memory and the CPU computes them; the rest of the model is on the GPU.
        context: number of tokens of each sequence, prompt and answer.
        device_bytes: the most GPU memory that is used at any time, weights included.
        host_bytes: the most host memory that is used at any time, weights included.
        kv_device_bytes: GPU memory of the cache while it decodes, as `memory()` reports it.
        kv_host_bytes: host memory of the cache while it decodes.
        short_device_bytes: GPU memory that is missing.
        short_host_bytes: host memory that is missing.
        seconds_to_first_token: of the prompt, which is as long as the context unless several sequences continue it;
            `None` where speeds are not known.
        seconds_per_token: of a decode step at the end of the context; `None` where speeds are not known, and where
            several sequences continue a prompt.
        longest_context: the longest context that fits, at most the model's; 0 if none does.
        seconds_to_read_longest: of a prompt that is as long; `None` where speeds are not known.
        code: Python program that uses the cache.
    """

    cache: str
    strategy: Strategy
    weights: int | None
    experts_on_host: bool
    context: int
    device_bytes: int
    host_bytes: int
    kv_device_bytes: int
    kv_host_bytes: int
    short_device_bytes: int
    short_host_bytes: int
    seconds_to_first_token: float | None
    seconds_per_token: float | None
    longest_context: int
    seconds_to_read_longest: float | None
    code: str

    @property
    def fits(self) -> bool:
        """Whether no memory is missing."""
        return self.short_device_bytes == self.short_host_bytes == 0

    @property
    def loss(self) -> int:
        """The rank of what is lost, 0 for full precision, then 8 bits, 4 bits, and fewer, of weights or the cache."""
        return max(_LOSS.get(bits, _TOO_MUCH) for bits in (self.weights, BITS.get(self.cache)))

    def is_faster_than(self, other: "Plan", times: float = 1.0) -> bool:
        """Whether a token is known to be more than `times` faster than with the other plan."""
        if self.seconds_per_token is None or other.seconds_per_token is None:
            return False
        return times * self.seconds_per_token < other.seconds_per_token


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
    longest = _longest_context(model, candidate, machine)
    of_longest = candidate.cost(model, longest) if longest else cost
    return Plan(
        cache=candidate.cache,
        strategy=candidate.strategy,
        weights=candidate.weights,
        experts_on_host=candidate.experts_on_host,
        context=context,
        device_bytes=most.device,
        host_bytes=most.host,
        kv_device_bytes=cost.decode.device,
        kv_host_bytes=cost.decode.host,
        short_device_bytes=max(0, most.device - machine.device_bytes),
        short_host_bytes=max(0, most.host - machine.host_bytes),
        seconds_to_first_token=seconds_to_first_token(model, candidate, cost, context, machine.speeds),
        seconds_per_token=seconds_per_token(model, candidate, cost, context, machine.speeds),
        longest_context=longest,
        seconds_to_read_longest=seconds_to_first_token(model, candidate, of_longest, longest or 1, machine.speeds),
        code=candidate.code(model),
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

    They are the fastest fitting plans in full precision, in 8 and in 4 bits, of the weights that the CPU multiplies and
    of keys and values. Where speeds are not known, the plan with the fewest transfers is taken. Full precision comes
    first, unless it takes more than 1.5 times as long a token as 8 bits. transformers' own cache is recommended only
    for a model that gains nothing from a `HybridCache`.
    """
    best: dict[int, Plan] = {}
    for plan in [plan for plan in plans if plan.cache != "stock"] or plans:
        if plan.fits and plan.loss < _TOO_MUCH and (plan.loss not in best or plan.is_faster_than(best[plan.loss])):
            best[plan.loss] = plan
    found = [best[loss] for loss in sorted(best)]
    if len(found) > 1 and found[1].loss == 1 and found[1].is_faster_than(found[0], times=_MUCH_FASTER):
        found[:2] = found[1::-1]
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
    taken = [each for each in candidates if each.strategy != Strategy.CPU_DECODE and each.weights is None]
    plans = [make_plan(model, each, context, machine) for each in taken]
    best = recommended(plans)
    if best is None:
        otherwise = " Or load the model on the CPU, and pass gpu_memory=0." if device_bytes else ""
        raise PlanError(why_nothing_fits(model, plans) + otherwise)
    chosen = taken[plans.index(best)]
    return HybridCache(config, chosen.placement, codec=chosen.codec)


def _longest_context(model: ModelCost, candidate: Candidate, machine: Machine) -> int:
    """The longest context that fits; the memory that is needed grows with the context."""

    def does_not_fit(context: int) -> bool:
        most = candidate.most(model, candidate.cost(model, context), context)
        return most.device > machine.device_bytes or most.host > machine.host_bytes

    longest = model.max_context
    return bisect_left(range(1, longest), True, key=does_not_fit) if does_not_fit(longest) else longest
