"""How to divide a cache between the GPU and host memory, so that GPU, bus and CPU finish together."""

from bisect import bisect_right
from dataclasses import replace

from ..layers import LEAST_DEVICE_TOKENS
from .candidates import BITS, Candidate
from .machine import Machine
from .model_cost import ModelCost
from .speed import Way, seconds_of_division

_GRANULE = 64
# Of what the GPU has room for: an allocator needs more than what is allocated.
USED_SHARE = 15 / 16


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
    """Of no layer the CPU attends to what is in host memory, of one, and so on; spread, so that the bus works too."""
    layers = sorted(model.shapes)
    timed: list[tuple[float, Candidate]] = []
    for numbers in (range(len(layers)), [len(layers)]):
        all_on_cpu = numbers[0] == len(layers)
        device_tokens = _most_device_tokens(model, name, context, machine, all_on_cpu)
        if not device_tokens:
            continue
        costs = None
        for number in numbers:
            on_cpu = tuple(layers[index * len(layers) // number] for index in range(number))
            candidate = Candidate(name, Way.BOTH, None, device_tokens, on_cpu)
            costs = costs or candidate.cost(model, context)
            division = candidate.division(model, context)
            seconds = seconds_of_division(model, costs, speed_name, division, machine.speeds)
            if seconds is not None:
                timed.append((seconds, candidate))
    return min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]


def _most_device_tokens(model: ModelCost, name: str, context: int, machine: Machine, all_on_cpu: bool) -> int:
    """
    Whole blocks that fit the GPU beside everything else, with some room left; 0 if all do, or too few.

    Where no layer is streamed there are no slots, so that more tokens fit.
    """
    candidate = Candidate(name, Way.BOTH, cpu_layers=tuple(model.shapes) if all_on_cpu else ())

    def device_bytes(device_tokens: int) -> int:
        tried = replace(candidate, device_tokens=device_tokens)
        return tried.most(model, tried.cost(model, context), context).device

    least = device_bytes(LEAST_DEVICE_TOKENS)
    room = least + USED_SHARE * (machine.device_bytes - least)

    def is_too_much(device_tokens: int) -> bool:
        return device_bytes(device_tokens) > room

    sizes = range(LEAST_DEVICE_TOKENS, context + _GRANULE, _GRANULE)
    number = bisect_right(sizes, False, key=is_too_much)
    return sizes[number - 1] if 0 < number < len(sizes) else 0
