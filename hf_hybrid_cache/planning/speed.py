"""How long a token takes, and the first one: what is read and computed, over the speeds of a machine."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from ..layers import Placement
from .cost import CacheCost
from .machine import DeviceSpeed, Speeds
from .model_cost import ModelCost


class Way(StrEnum):
    """Where the model decodes, where keys and values are, and who attends to them."""

    GPU = "on the GPU"
    STREAMED = "streamed"
    CPU_ATTENTION = "CPU attends"
    BOTH = "GPU + host"
    CPU_DECODE = "CPU decodes"
    CPU = "on the CPU"


def seconds_per_token(
    model: ModelCost, cost: CacheCost, cache: str, way: Way, speeds: Speeds, weights: int | None = None
) -> float | None:
    """
    Seconds of one decode step; `None` where a speed is not known.

    On the CPU everything comes one after the other. On the GPU work, and the launches of operations, overlap, and so do
    transfers that are streamed: the longest counts.

    Args:
        model: what the model costs.
        cost: what the cache costs.
        cache: its name, as in the speeds.
        way: where things are.
        speeds: of the machine.
        weights: bits of a weight on the CPU; `None` for weights as they are.
    """
    host, device, bus = speeds.host, speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model):
        return None
    if way in (Way.CPU, Way.CPU_DECODE):
        if host is None or not (weights is None or host.coded_weights.keys() >= _widths_read(model, weights)):
            return None
        return reading(model, cost, host, weights) + full_attention(model, cost, cache, host) + launching(model, host)
    if device is None:
        return None
    if way == Way.CPU_ATTENTION:
        if host is None:
            return None
        attention = full_attention(model, cost, cache, host) + len(model.shapes) * speeds.round_trip_seconds
        return reading(model, cost, device) + launching(model, device) + attention
    work = reading(model, cost, device) + full_attention(model, cost, cache, device)
    if way == Way.STREAMED:
        return None if bus is None else max(work, launching(model, device), cost.read_bytes / bus)
    return max(work, launching(model, device))


@dataclass(frozen=True)
class Division:
    """
    A layer's tokens on the GPU and in host memory, and to how many of these the CPU attends.

    Attributes:
        device_bytes: of one layer on the GPU.
        host_bytes: of one layer in host memory, as they are kept there.
        middle_bytes: of these tokens as the GPU attends to them.
        cpu_share: of the tokens in host memory, those that the CPU attends to; the others are streamed.
        resident_layers: on the GPU whole, instead.
        resident_bytes: of such a layer, as it is kept there.
    """

    device_bytes: int
    host_bytes: int
    middle_bytes: int
    cpu_share: float
    resident_layers: int
    resident_bytes: int


def seconds_of_division(
    model: ModelCost, cost: CacheCost, cache: str, division: Division, speeds: Speeds
) -> float | None:
    """
    Seconds of one decode step with tokens of each layer in both places; `None` where a speed is not known.

    While the CPU attends to its part of a layer the GPU attends to its own, and the bus brings what is streamed of the
    next layer. CPU and bus read the same memory: together no faster than the faster of them does alone.

    Args:
        model: what the model costs.
        cost: what the cache costs.
        cache: its name, as in the speeds of the CPU.
        division: where tokens are.
        speeds: of the machine.
    """
    host, device, bus, share = speeds.host, speeds.device, speeds.bus_bytes_per_second, division.cpu_share
    is_known = (host is not None or not share) and (bus is not None or share == 1)
    if not is_measured_kind(model) or device is None or not is_known:
        return None
    num_layers = len(model.shapes) - division.resident_layers
    resident = division.resident_layers * _attention(division.resident_bytes, cache, device)
    streamed_bytes = division.host_bytes * (1 - share)
    on_device = division.device_bytes + round(division.middle_bytes * (1 - share))
    on_gpu = _attention(on_device, "dynamic", device)
    # So few layers stay in the slots that layers take turns in.
    transfer = streamed_bytes / bus if bus is not None and num_layers > Placement().prefetch_layers + 1 else 0.0
    read, launched = reading(model, cost, device), launching(model, device)
    if host is None or not share:
        return max(num_layers * transfer, max(read, launched) + resident + num_layers * on_gpu)
    work = _attention(round(division.host_bytes * share), cache, host)
    both = min(work, transfer)
    if both and bus is not None:
        both *= slowdown_of_both(division.host_bytes * share / work, bus, host)
    on_cpu, transfer = both + max(0.0, work - transfer), both + max(0.0, transfer - work)
    # Launches run ahead of the GPU, but not past a layer that waits for the CPU.
    computed = read + launched + resident + num_layers * max(on_cpu + speeds.round_trip_seconds, on_gpu)
    return max(num_layers * transfer, computed)


def slowdown_of_both(cpu_bytes_per_second: float, bus_bytes_per_second: float, host: DeviceSpeed) -> float:
    """By how much CPU and bus are slower while both read host memory, which gives what the fastest reader gets."""
    memory = max(cpu_bytes_per_second, bus_bytes_per_second, host.weight_bytes_per_second)
    return max(1.0, (cpu_bytes_per_second + bus_bytes_per_second) / memory)


def seconds_to_first_token(
    model: ModelCost, cost: CacheCost, cache: str, way: Way, speeds: Speeds, context: int, weights: int | None = None
) -> float | None:
    """Seconds of a prompt of `context` tokens in chunks; the other arguments are those of `seconds_per_token`."""
    speed, bus = speeds.host if way == Way.CPU else speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model) or speed is None or cache not in speed.caches:
        return None
    # Where only decoding is on the CPU, the GPU reads the prompt with the weights as they are.
    flops = speed.flops
    if weights is not None and way == Way.CPU:
        coded = speed.coded_weights.get(weights)
        flops = None if coded is None else coded.flops
    if flops is None:
        return None
    attention = model.attention_flops(context) / speed.caches[cache].attention_flops
    seconds = context * model.token_flops / flops + attention
    if way in (Way.GPU, Way.CPU):
        return seconds
    if bus is None:
        return None
    # Every chunk streams what is before it.
    seconds = max(seconds, cost.read_bytes * sum(model.lengths(context)) / context / bus)
    return seconds + model.weight_bytes / bus if way == Way.CPU_DECODE else seconds


def is_measured_kind(model: ModelCost) -> bool:
    """Whether attention is the one that is measured: it is not in models with soft-capping or latent attention."""
    return model.has_kernel or not model.shapes


def _widths_read(model: ModelCost, weights: int) -> Set[int]:
    """Bits of all codes that a step reads, with weights of so many bits."""
    return model.coded_weights[weights].step_coded_bytes.keys()


def reading(model: ModelCost, cost: CacheCost, speed: DeviceSpeed, bits: int | None = None) -> float:
    """Seconds in which weights, and the layers that have transformers' own cache, are read."""
    if bits is None:
        weights = model.step_weight_bytes / speed.weight_bytes_per_second
    else:
        coded = model.coded_weights[bits]
        rates = {width: measured.bytes_per_second for width, measured in speed.coded_weights.items()}
        weights = sum(num_bytes / rates[width] for width, num_bytes in coded.step_coded_bytes.items())
        weights += coded.step_other_bytes / speed.weight_bytes_per_second
    if not model.others:
        return weights
    if (stock := speed.caches.get("stock")) is None:
        return weights + 3 * cost.other_bytes / speed.weight_bytes_per_second
    return weights + len(model.others) * stock.step_seconds(cost.other_bytes / len(model.others))


def full_attention(model: ModelCost, cost: CacheCost, cache: str, speed: DeviceSpeed) -> float:
    if speed.caches.get(cache) is None:
        return cost.moved_bytes / speed.weight_bytes_per_second
    num_layers = len(model.shapes)
    return num_layers * _attention(cost.read_bytes / num_layers, cache, speed) if num_layers else 0.0


def _attention(layer_bytes: float, cache: str, speed: DeviceSpeed) -> float:
    """Seconds of update and attention of one layer that holds so many bytes."""
    measured = speed.caches.get(cache)
    return layer_bytes / speed.weight_bytes_per_second if measured is None else measured.step_seconds(layer_bytes)


def launching(model: ModelCost, speed: DeviceSpeed) -> float:
    """Seconds that layers take whatever their sizes."""
    return model.num_layers * speed.layer_seconds
