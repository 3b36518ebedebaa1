"""How long a token takes, and the first one, with a model's experts in host memory and all else on the GPU."""

from itertools import pairwise

from .cost import CacheCost
from .machine import DeviceSpeed, Speeds
from .model_cost import ModelCost
from .speed import Way, full_attention, is_measured_kind, launching, reading, slowdown_of_both


def seconds_per_token_with_experts(
    model: ModelCost, cost: CacheCost, cache: str, way: Way, speeds: Speeds, bits: int | None = None
) -> float | None:
    """
    Seconds of one decode step; `None` where a speed is not known.

    GPU and CPU take turns in a layer, and the states of the tokens go from one to the other and back: nothing overlaps
    but keys and values that are streamed meanwhile.

    Args:
        model: what the model costs, with its experts.
        cost: what the cache costs.
        cache: its name, as in the speeds.
        way: where keys and values are, and who attends to them.
        speeds: of the machine.
        bits: of the experts' weights; `None` for weights as they are.
    """
    host, device, bus = speeds.host, speeds.device, speeds.bus_bytes_per_second
    rate = None if host is None else _bytes_per_second(host, bits)
    if not is_measured_kind(model) or host is None or device is None or rate is None:
        return None
    rest = model.without_experts()
    on_cpu = model.experts.read_bytes(model.batch, bits) / rate
    on_gpu = reading(rest, cost, device) + launching(rest, device)
    on_gpu += full_attention(model, cost, cache, host if way == Way.CPU_ATTENTION else device)
    round_trips = len(model.experts.layers) + (len(model.shapes) if way == Way.CPU_ATTENTION else 0)
    computed = on_gpu + on_cpu + round_trips * speeds.round_trip_seconds
    if way != Way.STREAMED:
        return computed
    if bus is None:
        return None
    transfer = cost.read_bytes / bus
    longer = min(on_cpu, transfer) * (slowdown_of_both(rate, bus, host) - 1.0)
    return max(transfer, computed) + longer


def seconds_to_first_token_with_experts(
    model: ModelCost, cost: CacheCost, cache: str, way: Way, speeds: Speeds, context: int, bits: int | None = None
) -> float | None:
    """
    Seconds of a prompt of `context` tokens in chunks; `None` where a speed is not known.

    The other arguments are those of `seconds_per_token_with_experts`. Of each chunk, the experts that its tokens choose
    are multiplied on the CPU, or cross the bus to the GPU, whichever takes less. They cross it as they are: a GPU that
    takes codes apart has not been measured.
    """
    device, bus = speeds.device, speeds.bus_bytes_per_second
    if not is_measured_kind(model) or device is None or device.flops is None or cache not in device.caches:
        return None
    if bus is None:  # which states of tokens cross too
        return None
    ends = model.lengths(context)
    chosen_bytes = sum(
        model.experts.read_bytes(model.batch * (end - start), bits) for start, end in pairwise([0, *ends])
    )
    # Every chunk streams what is before it.
    streamed_bytes = 0.0 if way == Way.GPU else cost.read_bytes * sum(ends) / context
    attention = model.attention_flops(context) / device.caches[cache].attention_flops
    on_gpu = context * model.without_experts().token_flops / device.flops + attention
    expert_flops = context * model.batch * model.experts.token_flops
    ways = []
    if (on_cpu := _seconds_on_cpu(speeds.host, expert_flops, chosen_bytes, bits)) is not None:
        crossing = context * model.batch * model.experts.crossing_bytes / bus
        ways.append(max(on_gpu + on_cpu + crossing, streamed_bytes / bus))
    if bits is None:
        ways.append(max(on_gpu + expert_flops / device.flops, (chosen_bytes + streamed_bytes) / bus))
    return min(ways, default=None)


def _seconds_on_cpu(host: DeviceSpeed | None, flops: float, num_bytes: float, bits: int | None) -> float | None:
    """Of products of a prompt with experts: with few tokens for each, reading them takes longer than arithmetic."""
    if host is None or (rate := _bytes_per_second(host, bits)) is None:
        return None
    flops_per_second = host.flops if bits is None else host.coded_weights[bits].flops
    return None if flops_per_second is None else max(flops / flops_per_second, num_bytes / rate)


def _bytes_per_second(host: DeviceSpeed, bits: int | None) -> float | None:
    """At which the CPU reads weights of so many bits."""
    if bits is None:
        return host.weight_bytes_per_second
    coded = host.coded_weights.get(bits)
    return None if coded is None else coded.bytes_per_second
