"""Dividing a cache between GPU and host memory, so that GPU, bus and CPU work at the same time."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from ..layers import LEAST_DEVICE_TOKENS
from .candidates import BITS, Candidate
from .machine import Machine
from .model_cost import ModelCost
from .prediction import Strategy, seconds_of_division

_GRANULE = 64
_SHARES = 32
# The share of the free GPU memory that is used; the allocator needs the rest.
USED_SHARE = 15 / 16
_WithMost = Callable[[ModelCost, Candidate, int, Machine], Candidate | None]


def divided_candidates(model: ModelCost, context: int, machine: Machine) -> list[Candidate]:
    """
    The fastest division of each quality, by the speeds of this machine.

    The list is empty where speeds are not known, or the GPU has room for the whole cache, or for too little of it.
    """
    if not model.has_kernel or not model.shapes:
        return []
    names = {name: "offloaded" if name == "dynamic" else name for name in BITS}
    found = (_fastest(model, name, speed_name, context, machine) for speed_name, name in names.items())
    return [candidate for candidate in found if candidate is not None]


def _fastest(model: ModelCost, name: str, speed_name: str, context: int, machine: Machine) -> Candidate | None:
    """The fastest of all divisions; the CPU attends to no token in host memory, or to a 32nd of them, and so on."""
    timed: list[tuple[float, Candidate]] = []
    in_part = [number / _SHARES for number in range(_SHARES)]
    tried: list[tuple[_WithMost, Candidate, list[float]]] = [
        (with_most_tokens, Candidate(name, Strategy.BOTH), in_part),
        # Without streaming there are no slots while decoding, so more tokens fit.
        (with_most_tokens, Candidate(name, Strategy.BOTH, cpu_fraction=1.0), [1.0]),
        # Whole layers need no scratch memory in the prefill, so more of them fits.
        (with_most_layers, Candidate(name, Strategy.BOTH), [0.0]),
    ]
    if BITS.get(name) is not None:  # without codes, a whole layer takes as much as its tokens
        tried.append((with_most_layers, Candidate(name, Strategy.BOTH, None, LEAST_DEVICE_TOKENS), in_part))
    for with_most, least, shares in tried:
        candidate = with_most(model, least, context, machine)
        if candidate is None:
            continue
        cost, division = candidate.cost(model, context), candidate.division(model, context)
        for share in shares:
            each = replace(division, cpu_fraction=share)
            seconds = seconds_of_division(model, cost, speed_name, each, machine.speeds)
            if seconds is not None:
                timed.append((seconds, replace(candidate, cpu_fraction=share)))
    return min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]


def with_most_tokens(model: ModelCost, candidate: Candidate, context: int, machine: Machine) -> Candidate | None:
    """The candidate with as many tokens of each layer on the GPU as fit; `None` if all do, or too few."""
    sizes = range(LEAST_DEVICE_TOKENS, max(context, LEAST_DEVICE_TOKENS) + _GRANULE, _GRANULE)
    number = _fitting(model, sizes, lambda size: replace(candidate, device_tokens=size), context, machine)
    return replace(candidate, device_tokens=sizes[number - 1]) if 0 < number < len(sizes) else None


def with_most_layers(model: ModelCost, candidate: Candidate, context: int, machine: Machine) -> Candidate | None:
    """The candidate with as many whole layers on the GPU as fit, quantized ones as codes; `None` if all do, or none."""
    numbers = range(len(model.shapes) + 1)
    fitting = _fitting(model, numbers, lambda number: replace(candidate, resident_layers=number), context, machine)
    return replace(candidate, resident_layers=fitting - 1) if 1 < fitting < len(numbers) else None


def _fitting(
    model: ModelCost, sizes: range, candidate_of: Callable[[int], Candidate], context: int, machine: Machine
) -> int:
    """The number of sizes for which the candidate fits the GPU beside the model, with some room left."""

    def device_bytes(size: int) -> int:
        candidate = candidate_of(size)
        return candidate.most(model, candidate.cost(model, context), context).device

    least = device_bytes(sizes[0])
    room = least + USED_SHARE * (machine.device_bytes - least)
    return bisect_right(sizes, False, key=lambda size: device_bytes(size) > room)
