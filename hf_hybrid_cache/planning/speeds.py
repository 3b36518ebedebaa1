"""The machine that a plan is for: its memory, and the speeds of reading and of products, measured in a second."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ..prefill_chunks import PREFILL_CHUNK_SIZE
from ..storage import available_host_bytes, can_page_lock
from .cache_cost import CacheCost
from .candidates import BITS, Candidate, Strategy
from .model_cost import ModelCost

# What is read of a memory's bandwidth, in the records of results/whole_step and results/context_sweep: torch multiplies
# a token with weights of 16 bits at half of it, our kernels read codes of weights at four fifths, and keys and values
# by their bits as follows; transformers' own cache copies them, and torch attends to the copies.
_OF_16_BITS, _OF_CODES, _OF_STOCK = 0.5, 0.8, 0.03
_OF_STATES: Mapping[object, float] = {None: 0.8, 8: 0.6}
_OF_FEW_BITS = 0.3
# A layer's operations besides: there, and on the GPU in results/gpu/without-cudnn-65536.
_LAYER_SECONDS = 5e-4
# What prompts reach of a large product's speed: context_sweep and weight_products of amd-epyc-znver4-2-cores.
_OF_PRODUCTS = 0.8
_READ_BYTES, _BUS_BYTES = 2**28, 2**27
_PRODUCT = 512, 4096, 2048  # rows, columns, and numbers that are summed up
_SECONDS, _MOST_ROUNDS = 0.2, 20


@dataclass(frozen=True)
class Speeds:
    """
    The speeds of a machine; `None` where not known.

    Attributes:
        host_bandwidth: bytes a second that the CPU reads of host memory.
        host_flops: floating-point operations a second of the CPU in products with many tokens.
        gpu_bandwidth: bytes a second that the GPU reads of its memory.
        gpu_flops: likewise of the GPU.
        bus_bandwidth: bytes a second from page-locked host memory to the GPU.
    """

    host_bandwidth: float | None = None
    host_flops: float | None = None
    gpu_bandwidth: float | None = None
    gpu_flops: float | None = None
    bus_bandwidth: float | None = None


@dataclass(frozen=True)
class Machine:
    """
    The memory that a plan may use, and the speeds of the machine.

    Attributes:
        device_bytes: GPU memory; 0 for no GPU.
        host_bytes: host memory.
        speeds: as far as they are known.
    """

    device_bytes: int
    host_bytes: int
    speeds: Speeds = Speeds()


def this_machine(device_bytes: int | None = None, host_bytes: int | None = None, speeds: Speeds = Speeds()) -> Machine:
    """
    Describe this machine.

    Args:
        device_bytes: GPU memory that a plan may use; `None` for the memory that is free now.
        host_bytes: host memory that a plan may use; `None` for the memory that is free now.
        speeds: as far as they are known, as from `measured_speeds`.
    """
    device_bytes = free_device_bytes() if device_bytes is None else device_bytes
    return Machine(device_bytes, available_host_bytes() if host_bytes is None else host_bytes, speeds)


def default_chunk(on_gpu: bool) -> int:
    """The default `prefill_chunk_size`: on a GPU few tokens, to save memory; on a CPU the fastest number."""
    return 512 if on_gpu else PREFILL_CHUNK_SIZE


def free_device_bytes() -> int:
    """Free bytes on the current accelerator, torch's reserve included; 0 without one, or if it does not say."""
    if not torch.accelerator.is_available():
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info()
    except RuntimeError:
        return 0
    return free + torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()


@cache
@torch.inference_mode()
def measured_speeds(dtype: torch.dtype, with_gpu: bool = True) -> Speeds:
    """
    Measure the speeds of this machine in about a second; a later call returns what the first one has measured.

    Args:
        dtype: of a model's weights.
        with_gpu: measure the current accelerator too, if there is one.
    """
    numbers = torch.ones(_READ_BYTES // 4, dtype=torch.int32)
    host_bandwidth = _READ_BYTES / _seconds(numbers.max)
    host_flops = _flops(torch.device("cpu"), dtype)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() and with_gpu else None
    if accelerator is None:
        return Speeds(host_bandwidth, host_flops)
    there = torch.ones(_READ_BYTES, dtype=torch.uint8, device=accelerator)
    block = torch.ones(_BUS_BYTES, dtype=torch.uint8, pin_memory=can_page_lock(accelerator.type))
    return Speeds(
        host_bandwidth,
        host_flops,
        2 * _READ_BYTES / _seconds(there.clone),  # a copy reads and writes
        _flops(accelerator, dtype),
        _BUS_BYTES / _seconds(lambda: block.to(accelerator, non_blocking=True)),
    )


def seconds_per_token(
    model: ModelCost, candidate: Candidate, cost: CacheCost, context: int, speeds: Speeds
) -> float | None:
    """
    Seconds of one decode step: bytes that are read over the bandwidths of their memories, and a fixed time a layer.

    Only streamed keys and values overlap with the rest.

    Args:
        model: its cost.
        candidate: the cache, and where it is.
        cost: of the cache at `context` tokens.
        context: number of tokens of each sequence.
        speeds: of the machine.

    Returns:
        `None` where a speed is not known, where several sequences continue a prompt, and for attention that torch
        computes otherwise than the kernel, such as soft-capping and latent attention.
    """
    strategy, bits = candidate.strategy, candidate.weights
    host, gpu, bus = (rate or 0.0 for rate in (speeds.host_bandwidth, speeds.gpu_bandwidth, speeds.bus_bandwidth))
    on_cpu = strategy in (Strategy.CPU, Strategy.CPU_DECODE)
    attends_on_cpu = on_cpu or strategy == Strategy.CPU_ATTENTION
    is_divided = strategy == Strategy.BOTH
    needed = [host] * (attends_on_cpu or is_divided or candidate.experts_on_host) + [gpu] * (strategy != Strategy.CPU)
    if 0.0 in [*needed, *([bus] * (is_divided or strategy == Strategy.STREAMED))] or not _is_known(model):
        return None
    seconds = model.num_layers * _LAYER_SECONDS
    of_weights = _OF_CODES if bits is not None or model.dtype.itemsize > 2 else _OF_16_BITS
    of_states = _OF_STOCK if candidate.cache == "stock" else _OF_STATES.get(BITS.get(candidate.cache), _OF_FEW_BITS)
    if on_cpu:
        weights = model.step_weight_bytes if bits is None else model.quantized_weights[bits].step_bytes
        seconds += weights / (host * of_weights) + cost.other_bytes / host
    elif candidate.experts_on_host:
        seconds += model.experts.read_bytes(model.batch, bits) / (host * of_weights)
        seconds += (model.without_experts().step_weight_bytes + cost.other_bytes) / gpu
    else:
        seconds += (model.step_weight_bytes + cost.other_bytes) / gpu
    if attends_on_cpu:
        return seconds + cost.read_bytes / (host * of_states)
    if strategy == Strategy.STREAMED:
        return max(seconds + cost.moved_bytes / gpu, cost.read_bytes / bus)
    if not is_divided:
        return seconds + cost.moved_bytes / gpu
    share = min(1.0, candidate.device_tokens / context)
    on_gpu = share * context * sum(sum(shape.token_bytes) for shape in model.shapes.values()) / gpu
    # The CPU and the bus read the same memory.
    return seconds + max(on_gpu, (1 - share) * cost.read_bytes / min(host, host * of_states + bus))


def seconds_to_first_token(
    model: ModelCost, candidate: Candidate, cost: CacheCost, context: int, speeds: Speeds
) -> float | None:
    """
    Seconds of the prompt of `context` tokens: arithmetic, or streaming where that takes longer.

    The arguments are those of `seconds_per_token`, and so are the cases in which the result is `None`, except for that
    of several sequences.
    """
    tokens, strategy, bus = model.prompt_tokens(context), candidate.strategy, speeds.bus_bandwidth
    flops, of_experts = speeds.host_flops if strategy == Strategy.CPU else speeds.gpu_flops, 0.0
    if candidate.experts_on_host:
        of_experts = tokens * model.batch * model.experts.token_flops
        model = model.without_experts()
    if flops is None or (of_experts and speeds.host_flops is None) or (model.shapes and not model.has_kernel):
        return None
    seconds = (tokens * model.token_flops + model.attention_flops(tokens)) / (flops * _OF_PRODUCTS)
    seconds += of_experts / ((speeds.host_flops or 1.0) * _OF_PRODUCTS)
    if strategy in (Strategy.CPU, Strategy.GPU):
        return seconds
    if bus is None:
        return None
    # Each chunk streams all keys and values before it.
    seconds = max(seconds, cost.read_bytes * sum(model.lengths(tokens)) / tokens / bus)
    return seconds + model.weight_bytes / bus if strategy == Strategy.CPU_DECODE else seconds


def _is_known(model: ModelCost) -> bool:
    """Whether the time of a token is predicted: rows that share a prompt are bound by arithmetic."""
    return model.continuations == 1 and (model.has_kernel or not model.shapes)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of products on a device."""
    rows, columns, inner = _PRODUCT
    tokens, weights = (torch.full((size, inner), 0.1, dtype=dtype, device=device) for size in (rows, columns))
    return 2 * rows * columns * inner / _seconds(lambda: torch.nn.functional.linear(tokens, weights))


def _seconds(action: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds: other processes only make one slower. The first round is not counted."""

    def once() -> float:
        start = time.perf_counter()
        action()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    once()
    end, seconds = time.perf_counter() + _SECONDS, [once()]
    while time.perf_counter() < end and len(seconds) < _MOST_ROUNDS:
        seconds.append(once())
    return min(seconds)
