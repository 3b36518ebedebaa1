"""Seconds per token and to the first token, with the experts in host memory and the rest of the model on the GPU."""

from itertools import pairwise

from .cost import CacheCost
from .machine import DeviceSpeed, Speeds
from .model_cost import ModelCost
from .prediction import Strategy, attention_seconds, is_measured_kind, launch_seconds, slowdown_of_both, weight_seconds


def seconds_per_token_with_experts(
    model: ModelCost, cost: CacheCost, cache: str, strategy: Strategy, speeds: Speeds, bits: int | None = None
) -> float | None:
    """
    Seconds of one decode step; `None` where a speed is not known.

    GPU and CPU compute a layer in turn, and hidden states cross the bus between them. Only streamed keys and values
    overlap with that.

    Args:
        model: cost of the model, experts included.
        cost: cost of the cache.
        cache: name of the cache, as in the speeds.
        strategy: where keys and values are, and which processor computes attention.
        speeds: of the machine.
        bits: of the experts' weights; `None` for weights as they are.
    """
    host, device, bus = speeds.host, speeds.device, speeds.bus_bytes_per_second
    rate = None if host is None else _bytes_per_second(host, bits)
    if not is_measured_kind(model) or host is None or device is None or rate is None:
        return None
    rest = model.without_experts()
    on_cpu = model.experts.read_bytes(model.batch, bits) / rate
    on_gpu = weight_seconds(rest, cost, device) + launch_seconds(rest, device)
    on_gpu += attention_seconds(model, cost, cache, host if strategy == Strategy.CPU_ATTENTION else device)
    round_trips = len(model.experts.layers) + (len(model.shapes) if strategy == Strategy.CPU_ATTENTION else 0)
    computed = on_gpu + on_cpu + round_trips * speeds.round_trip_seconds
    if strategy != Strategy.STREAMED:
        return computed
    if bus is None:
        return None
    transfer = cost.read_bytes / bus
    longer = min(on_cpu, transfer) * (slowdown_of_both(rate, bus, host) - 1.0)
    return max(transfer, computed) + longer


def seconds_to_first_token_with_experts(
    model: ModelCost,
    cost: CacheCost,
    cache: str,
    strategy: Strategy,
    speeds: Speeds,
    context: int,
    bits: int | None = None,
) -> float | None:
    """
    Seconds of the prefill of `context` tokens in chunks; `None` where a speed is not known.

    The other arguments are those of `seconds_per_token_with_experts`. The experts that the tokens of a chunk choose are
    multiplied on the CPU, or copied to the GPU, whichever is faster. Only experts that are not quantized are copied:
    decoding of codes on a GPU has not been measured.
    """
    device, bus = speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model) or device is None or device.flops is None or cache not in device.caches:
        return None
    if bus is None:  # hidden states cross it
        return None
    ends = model.lengths(context)
    chosen_bytes = sum(
        model.experts.read_bytes(model.batch * (end - start), bits) for start, end in pairwise([0, *ends])
    )
    # Each chunk streams all keys and values before it.
    streamed_bytes = 0.0 if strategy == Strategy.GPU else cost.read_bytes * sum(ends) / context
    attention = model.attention_flops(context) / device.caches[cache].attention_flops
    on_gpu = context * model.without_experts().token_flops / device.flops + attention
    expert_flops = context * model.batch * model.experts.token_flops
    strategies = []
    if (on_cpu := _seconds_on_cpu(speeds.host, expert_flops, chosen_bytes, bits)) is not None:
        crossing = context * model.batch * model.experts.crossing_bytes / bus
        strategies.append(max(on_gpu + on_cpu + crossing, streamed_bytes / bus))
    if bits is None:
        strategies.append(max(on_gpu + expert_flops / device.flops, (chosen_bytes + streamed_bytes) / bus))
    return min(strategies, default=None)


def _seconds_on_cpu(host: DeviceSpeed | None, flops: float, num_bytes: float, bits: int | None) -> float | None:
    """Seconds of a prompt's products with experts: of arithmetic, or of reading them if that takes longer."""
    if host is None or (rate := _bytes_per_second(host, bits)) is None:
        return None
    flops_per_second = host.flops if bits is None else host.quantized_weights[bits].flops
    return None if flops_per_second is None else max(flops / flops_per_second, num_bytes / rate)


def _bytes_per_second(host: DeviceSpeed, bits: int | None) -> float | None:
    """The rate at which the CPU reads weights of so many bits; `None` if it is not known."""
    if bits is None:
        return host.weight_bytes_per_second
    quantized = host.quantized_weights.get(bits)
    return None if quantized is None else quantized.bytes_per_second
