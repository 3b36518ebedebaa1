"""How to divide a cache between the GPU and host memory, so that GPU, bus and CPU finish together."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from ..layers import LEAST_DEVICE_TOKENS
from .candidates import BITS, Candidate
from .machine import Machine
from .model_cost import ModelCost
from .speed import Way, seconds_of_division

_GRANULE = 64
_SHARES = 32
# Of what the GPU has room for: an allocator needs more than what is allocated.
USED_SHARE = 15 / 16
_WithMost = Callable[[ModelCost, Candidate, int, Machine], Candidate | None]


def divided_candidates(model: ModelCost, context: int, machine: Machine) -> list[Candidate]:
    """
    For each quality a cache that is divided as this machine is fastest with, by its speeds.

    None where speeds are not known, where the GPU has room for all, or for too little.
    """
    if not model.has_kernel or not model.shapes:
        return []
    names = {name: "offloaded" if name == "dynamic" else name for name in BITS}
    found = (_fastest(model, name, speed_name, context, machine) for speed_name, name in names.items())
    return [candidate for candidate in found if candidate is not None]


def _fastest(model: ModelCost, name: str, speed_name: str, context: int, machine: Machine) -> Candidate | None:
    """Of those in which the CPU attends to nothing in host memory, to a 32nd of it, and so on."""
    timed: list[tuple[float, Candidate]] = []
    in_part = [number / _SHARES for number in range(_SHARES)]
    tried: list[tuple[_WithMost, Candidate, list[float]]] = [
        (with_most_tokens, Candidate(name, Way.BOTH), in_part),
        # There are no slots while decoding, so that more tokens fit.
        (with_most_tokens, Candidate(name, Way.BOTH, cpu_share=1.0), [1.0]),
        # Nothing is put together of parts for the prompt, so that more fits.
        (with_most_layers, Candidate(name, Way.BOTH), [0.0]),
    ]
    if BITS.get(name) is not None:  # otherwise whole layers are as large as their tokens
        tried.append((with_most_layers, Candidate(name, Way.BOTH, None, LEAST_DEVICE_TOKENS), in_part))
    for with_most, least, shares in tried:
        candidate = with_most(model, least, context, machine)
        if candidate is None:
            continue
        cost, division = candidate.cost(model, context), candidate.division(model, context)
        for share in shares:
            each = replace(division, cpu_share=share)
            seconds = seconds_of_division(model, cost, speed_name, each, machine.speeds)
            if seconds is not None:
                timed.append((seconds, replace(candidate, cpu_share=share)))
    return min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]


def with_most_tokens(model: ModelCost, candidate: Candidate, context: int, machine: Machine) -> Candidate | None:
    """With as many tokens of each layer on the GPU as it has room for; `None` if that is all, or too few."""
    sizes = range(LEAST_DEVICE_TOKENS, max(context, LEAST_DEVICE_TOKENS) + _GRANULE, _GRANULE)
    number = _fitting(model, sizes, lambda size: replace(candidate, device_tokens=size), context, machine)
    return replace(candidate, device_tokens=sizes[number - 1]) if 0 < number < len(sizes) else None


def with_most_layers(model: ModelCost, candidate: Candidate, context: int, machine: Machine) -> Candidate | None:
    """With as many whole layers there, as they are coded; `None` if that is all, or none."""
    numbers = range(len(model.shapes) + 1)
    fitting = _fitting(model, numbers, lambda number: replace(candidate, resident_layers=number), context, machine)
    return replace(candidate, resident_layers=fitting - 1) if 1 < fitting < len(numbers) else None


def _fitting(
    model: ModelCost, sizes: range, candidate_of: Callable[[int], Candidate], context: int, machine: Machine
) -> int:
    """For how many of the sizes the candidate fits the GPU beside everything else, with some room left."""

    def device_bytes(size: int) -> int:
        candidate = candidate_of(size)
        return candidate.most(model, candidate.cost(model, context), context).device

    least = device_bytes(sizes[0])
    room = least + USED_SHARE * (machine.device_bytes - least)
    return bisect_right(sizes, False, key=lambda size: device_bytes(size) > room)
