"""Seconds per token and to the first token: bytes that are read and operations, divided by the machine's speeds."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from ..layers import Placement
from .cost import CacheCost
from .machine import DeviceSpeed, Speeds
from .model_cost import ModelCost


class Strategy(StrEnum):
    """The place where the model decodes, the place of keys and values, and the processor that computes attention."""

    GPU = "on the GPU"
    STREAMED = "streamed"
    CPU_ATTENTION = "CPU attends"
    BOTH = "GPU + host"
    CPU_DECODE = "CPU decodes"
    CPU = "on the CPU"


def seconds_per_token(
    model: ModelCost, cost: CacheCost, cache: str, strategy: Strategy, speeds: Speeds, weights: int | None = None
) -> float | None:
    """
    Seconds of one decode step; `None` where a speed is not known.

    On the CPU nothing overlaps, and where the CPU attends for a model on the GPU all terms add up. Otherwise
    computation, launches and streamed transfers overlap on the GPU, so the longest counts.

    Args:
        model: cost of the model.
        cost: cost of the cache.
        cache: name of the cache, as in the speeds.
        strategy: where model and cache are.
        speeds: of the machine.
        weights: bits of a weight on the CPU; `None` for weights as they are.
    """
    host, device, bus = speeds.host, speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model):
        return None
    if strategy in (Strategy.CPU, Strategy.CPU_DECODE):
        if host is None or not (weights is None or host.quantized_weights.keys() >= _widths_read(model, weights)):
            return None
        return (
            weight_seconds(model, cost, host, weights)
            + attention_seconds(model, cost, cache, host)
            + launch_seconds(model, host)
        )
    if device is None:
        return None
    if strategy == Strategy.CPU_ATTENTION:
        if host is None:
            return None
        attention = attention_seconds(model, cost, cache, host) + len(model.shapes) * speeds.round_trip_seconds
        return weight_seconds(model, cost, device) + launch_seconds(model, device) + attention
    work = weight_seconds(model, cost, device) + attention_seconds(model, cost, cache, device)
    if strategy == Strategy.STREAMED:
        return None if bus is None else max(work, launch_seconds(model, device), cost.read_bytes / bus)
    return max(work, launch_seconds(model, device))


@dataclass(frozen=True)
class Division:
    """
    The division of a layer's keys and values between GPU and host memory.

    Attributes:
        device_bytes: of one layer on the GPU.
        host_bytes: of one layer in host memory, as they are stored there.
        middle_bytes: of the same tokens, as the GPU attends to them if they are streamed.
        cpu_fraction: the share of the tokens in host memory that the CPU attends to; the others are streamed.
        resident_layers: number of layers that are not divided but wholly on the GPU.
        resident_bytes: of one such layer.
    """

    device_bytes: int
    host_bytes: int
    middle_bytes: int
    cpu_fraction: float
    resident_layers: int
    resident_bytes: int


def seconds_of_division(
    model: ModelCost, cost: CacheCost, cache: str, division: Division, speeds: Speeds
) -> float | None:
    """
    Seconds of one decode step with a divided cache; `None` where a speed is not known.

    CPU and GPU attend to their parts of a layer at the same time, while the bus streams the next layer. CPU and bus
    read the same memory: together they are no faster than the faster of them alone.

    Args:
        model: cost of the model.
        cost: cost of the cache.
        cache: name of the cache, as in the CPU's speeds.
        division: of each layer.
        speeds: of the machine.
    """
    host, device, bus, share = speeds.host, speeds.device, speeds.bus_bytes_per_second, division.cpu_fraction
    is_known = (host is not None or not share) and (bus is not None or share == 1)
    if not is_measured_kind(model) or device is None or not is_known:
        return None
    num_layers = len(model.shapes) - division.resident_layers
    resident = division.resident_layers * _attention(division.resident_bytes, cache, device)
    streamed_bytes = division.host_bytes * (1 - share)
    on_device = division.device_bytes + round(division.middle_bytes * (1 - share))
    on_gpu = _attention(on_device, "dynamic", device)
    # With so few layers each keeps its own slot, and nothing is streamed.
    transfer = streamed_bytes / bus if bus is not None and num_layers > Placement().prefetch_layers + 1 else 0.0
    read, launched = weight_seconds(model, cost, device), launch_seconds(model, device)
    if host is None or not share:
        return max(num_layers * transfer, max(read, launched) + resident + num_layers * on_gpu)
    work = _attention(round(division.host_bytes * share), cache, host)
    both = min(work, transfer)
    if both and bus is not None:
        both *= slowdown_of_both(division.host_bytes * share / work, bus, host)
    on_cpu, transfer = both + max(0.0, work - transfer), both + max(0.0, transfer - work)
    # A layer that waits for the CPU keeps launches from running ahead of the GPU.
    computed = read + launched + resident + num_layers * max(on_cpu + speeds.round_trip_seconds, on_gpu)
    return max(num_layers * transfer, computed)


def slowdown_of_both(cpu_bytes_per_second: float, bus_bytes_per_second: float, host: DeviceSpeed) -> float:
    """The factor by which CPU and bus are slower while both read host memory, as fast as the fastest reader alone."""
    memory = max(cpu_bytes_per_second, bus_bytes_per_second, host.weight_bytes_per_second)
    return max(1.0, (cpu_bytes_per_second + bus_bytes_per_second) / memory)


def seconds_to_first_token(
    model: ModelCost,
    cost: CacheCost,
    cache: str,
    strategy: Strategy,
    speeds: Speeds,
    context: int,
    weights: int | None = None,
) -> float | None:
    """Seconds of the prefill of `context` tokens in chunks; the other arguments are those of `seconds_per_token`."""
    speed, bus = speeds.host if strategy == Strategy.CPU else speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model) or speed is None or cache not in speed.caches:
        return None
    # With CPU_DECODE the GPU computes the prefill, with the weights as they are.
    flops = speed.flops
    if weights is not None and strategy == Strategy.CPU:
        quantized = speed.quantized_weights.get(weights)
        flops = None if quantized is None else quantized.flops
    if flops is None:
        return None
    attention = model.attention_flops(context) / speed.caches[cache].attention_flops
    seconds = context * model.token_flops / flops + attention
    if strategy in (Strategy.GPU, Strategy.CPU):
        return seconds
    if bus is None:
        return None
    # Each chunk streams all keys and values before it.
    seconds = max(seconds, cost.read_bytes * sum(model.lengths(context)) / context / bus)
    return seconds + model.weight_bytes / bus if strategy == Strategy.CPU_DECODE else seconds


def is_measured_kind(model: ModelCost) -> bool:
    """Whether the model's attention is of the measured kind; soft-capping and latent attention are not."""
    return model.has_kernel or not model.shapes


def _widths_read(model: ModelCost, weights: int) -> Set[int]:
    """The bits of all codes that a step reads if the model has weights of so many bits."""
    return model.quantized_weights[weights].step_quantized_bytes.keys()


def weight_seconds(model: ModelCost, cost: CacheCost, speed: DeviceSpeed, bits: int | None = None) -> float:
    """Seconds of reading the weights, and the layers with transformers' own cache."""
    if bits is None:
        weights = model.step_weight_bytes / speed.weight_bytes_per_second
    else:
        quantized = model.quantized_weights[bits]
        rates = {width: measured.bytes_per_second for width, measured in speed.quantized_weights.items()}
        weights = sum(num_bytes / rates[width] for width, num_bytes in quantized.step_quantized_bytes.items())
        weights += quantized.step_other_bytes / speed.weight_bytes_per_second
    if not model.others:
        return weights
    if (stock := speed.caches.get("stock")) is None:
        return weights + 3 * cost.other_bytes / speed.weight_bytes_per_second
    return weights + len(model.others) * stock.step_seconds(cost.other_bytes / len(model.others))


def attention_seconds(model: ModelCost, cost: CacheCost, cache: str, speed: DeviceSpeed) -> float:
    """Seconds of update and attention of all full-attention layers."""
    if speed.caches.get(cache) is None:
        return cost.moved_bytes / speed.weight_bytes_per_second
    num_layers = len(model.shapes)
    return num_layers * _attention(cost.read_bytes / num_layers, cache, speed) if num_layers else 0.0


def _attention(layer_bytes: float, cache: str, speed: DeviceSpeed) -> float:
    """Seconds of update and attention of one layer with so many stored bytes."""
    measured = speed.caches.get(cache)
    return layer_bytes / speed.weight_bytes_per_second if measured is None else measured.step_seconds(layer_bytes)


def launch_seconds(model: ModelCost, speed: DeviceSpeed) -> float:
    """Seconds of all layers that do not depend on their sizes."""
    return model.num_layers * speed.layer_seconds
