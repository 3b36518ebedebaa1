"""The caches to choose from: the code that makes each, the memory that a model with it needs, and that of a machine."""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from ..cache_argument import CACHE_ARGUMENT
from ..codecs import minmax
from ..layers import LEAST_DEVICE_TOKENS, Placement
from ..models.shapes import SMOLLM2
from ..scalars import PREFILL_CHUNK_SIZE
from ..storage import GRANULE, KVCodec, available_host_bytes
from .cache_cost import CacheCost, Held, cache_cost, stock_cost
from .model_cost import ModelCost

# Python and its libraries in host memory, CUDA and its libraries on the GPU.
RUNTIME_BYTES = 2**29
# Bits of keys and values by name of a cache, the best quality first.
BITS: Mapping[str, int | tuple[int, int] | None] = {
    "dynamic": None,
    "quantized-8": 8,
    "quantized-4": 4,
    "quantized-4-2": (4, 2),
    "quantized-2": 2,
}
# Tokens of a divided layer are added in blocks; the rest of the free GPU memory is for the allocator.
_USED_SHARE = 15 / 16


class Strategy(StrEnum):
    """The place where the model decodes, the place of keys and values, and the processor that computes attention."""

    GPU = "on the GPU"
    BOTH = "GPU + host"
    STREAMED = "streamed"
    CPU_ATTENTION = "CPU attends"
    CPU = "on the CPU"


@dataclass(frozen=True)
class Candidate:
    """
    A cache that could be used, with the way to run the model.

    Attributes:
        cache: its name: "stock" for transformers' `DynamicCache`, "offloaded", or one of `BITS`.
        strategy: where keys and values are, and whether GPU or CPU computes attention and decodes.
        weights: bits of the weights that the CPU multiplies; `None` for the weights as they are.
        device_tokens: with `Strategy.BOTH`, the most tokens of each layer on the GPU; the others are in host memory,
            where the CPU attends to a fraction of them, while the rest is streamed.
        experts_on_host: the experts are in host memory and the CPU computes them; the rest of the model is on the GPU.
    """

    cache: str
    strategy: Strategy
    weights: int | None = None
    device_tokens: int = 0
    experts_on_host: bool = False

    @property
    def placement(self) -> Placement:
        """The placement of the cache during the prefill."""
        if self.strategy == Strategy.BOTH:
            return Placement(offload=True, cpu_decode="auto", device_tokens=self.device_tokens)
        streamed = self.strategy == Strategy.STREAMED or self.cache == "offloaded"
        return Placement(offload=streamed, cpu_decode=True if self.strategy == Strategy.CPU_ATTENTION else None)

    @property
    def codec(self) -> KVCodec | None:
        """The codec of the cache; `None` for full precision."""
        bits = BITS.get(self.cache)
        return None if bits is None else minmax(bits)

    def cost(self, model: ModelCost, context: int) -> CacheCost:
        """The cost of the cache at `context` tokens."""
        on_cpu = self.strategy == Strategy.CPU
        if self.cache == "stock":
            return stock_cost(model, context, on_cpu)
        return cache_cost(model, self.placement, self.codec, context, on_cpu)

    def most(self, model: ModelCost, cost: CacheCost, context: int) -> Held:
        """The most bytes that model, cache and process ever hold, also while the model is loaded."""
        running = self.running(model, cost, context)
        return Held(running.device, max(running.host, self.loading_bytes(model)))

    def loading_bytes(self, model: ModelCost) -> int:
        """Host memory for loading the model there, quantized matrix by matrix; 0 if it is loaded to the GPU."""
        if self.strategy != Strategy.CPU and not self.experts_on_host:
            return 0
        if self.weights is None:
            return model.weight_bytes + RUNTIME_BYTES
        quantized = model.quantized_weights[self.weights]
        weights = quantized.num_bytes
        if model.comes_quantized:  # such files cannot be quantized again while they are read
            weights = model.weight_bytes
        elif self.experts_on_host:
            weights = model.experts.total_bytes(self.weights) + model.without_experts().weight_bytes
        return weights + RUNTIME_BYTES + quantized.largest_matrix_bytes

    def running(self, model: ModelCost, cost: CacheCost, context: int) -> Held:
        """The most bytes that model, cache and process hold once the model is loaded."""
        working = model.working_bytes(context)
        if self.strategy == Strategy.CPU:
            weights = model.weight_bytes if self.weights is None else model.quantized_weights[self.weights].num_bytes
            with_cache = max(cost.prefill.host + working, cost.decode.host)
            return Held(0, weights + RUNTIME_BYTES + with_cache)
        weights = model.weight_bytes
        host = max(cost.prefill.host, cost.decode.host) + RUNTIME_BYTES
        if self.experts_on_host:
            weights = model.without_experts().weight_bytes
            # The CPU's part of the activations is not known; it is at most that of the first chunk.
            host += model.experts.total_bytes(self.weights) + model.least_working_bytes
            # Two experts, not quantized, are on the GPU: one is copied while the other is multiplied.
            working += 2 * model.experts.largest_bytes
        return Held(weights + RUNTIME_BYTES + max(cost.prefill.device + working, cost.decode.device), host)

    def program(self, model: ModelCost) -> str:
        """A Python program that loads the model and generates with the cache."""
        bits, is_stock = BITS.get(self.cache), self.cache == "stock"
        options = ["config=model.config" if is_stock else "model.config"]
        if bits is not None:
            options += [f"bits={bits}", *["offload=True"] * self.placement.offload]
        options += {
            Strategy.CPU_ATTENTION: ["cpu_decode=True"],
            Strategy.BOTH: ['cpu_decode="auto"', f"device_tokens={self.device_tokens}"],
        }.get(self.strategy, [])
        of_full_precision = "OffloadedHybridCache" if self.placement.offload else "DynamicHybridCache"
        name = "DynamicCache" if is_stock else of_full_precision if bits is None else "QuantizedHybridCache"
        ours, prepared = [] if is_stock else [name], []

        loaded_on = "cpu" if self.strategy == Strategy.CPU or self.experts_on_host else "cuda"
        dtype = str(model.dtype).removeprefix("torch.")
        loading = [json.dumps(model.name), f"dtype={json.dumps(dtype)}", f"device_map={json.dumps(loaded_on)}"]
        is_quantized = self.weights is not None
        if is_quantized and not model.comes_quantized:
            ours.append("QuantizedWeightsConfig")
            only = ", only_experts=True" if self.experts_on_host else ""
            loading.append(f"quantization_config=QuantizedWeightsConfig(bits={self.weights}{only})")
        is_loaded_by_us = model.name == SMOLLM2 or model.name.lower().endswith(".gguf")
        if is_loaded_by_us:
            loading[1] = f"dtype=torch.{dtype}"
            loaded = f"model, tokenizer = load({', '.join(loading)})"
        else:
            loaded = f"model = AutoModelForCausalLM.from_pretrained({', '.join(loading)})"
        of_transformers = ["AutoModelForCausalLM"] * (not is_loaded_by_us) + ["DynamicCache"] * is_stock
        if self.experts_on_host:
            ours.append("move_experts_to_host")
            to_few_bits = f", bits={self.weights}" if is_quantized and model.comes_quantized else ""
            prepared = [f"move_experts_to_host(model{to_few_bits})", 'model.to("cuda")']
        elif is_quantized and model.comes_quantized:
            ours.append("quantize_weights")
            prepared = [f"quantize_weights(model, {self.weights})"]

        generate = ["**inputs", f"{CACHE_ARGUMENT}=cache", "max_new_tokens=200", f"prefill_chunk_size={model.chunk}"]
        lines = [
            *["import torch"] * is_loaded_by_us,
            *([f"from transformers import {', '.join(of_transformers)}"] if of_transformers else []),
            *([f"from hf_hybrid_cache import {', '.join(sorted(ours))}"] if ours else []),
            *["from hf_hybrid_cache.models import load"] * is_loaded_by_us,
            "",
            loaded,
            *prepared,
            f"cache = {name}({', '.join(options)})",
            f"model.generate({', '.join(generate)})",
        ]
        return "\n".join(lines)


def gpu_candidates(model: ModelCost, context: int, device_bytes: int) -> list[Candidate]:
    """The caches to choose from with the model on a GPU: the best quality first, then the fewest transfers."""
    found = [Candidate("stock", Strategy.GPU)]
    for name in BITS if model.shapes else ():
        streamed = "offloaded" if name == "dynamic" else name
        found.append(Candidate(name, Strategy.GPU))
        if model.has_kernel:
            found += _with_most_tokens(model, Candidate(streamed, Strategy.BOTH), context, device_bytes)
        found.append(Candidate(streamed, Strategy.STREAMED))
        found += [Candidate(name, Strategy.CPU_ATTENTION)] * model.has_kernel
    return found


def expert_candidates(model: ModelCost, context: int, device_bytes: int) -> list[Candidate]:
    """
    The caches to choose from with the experts in host memory and the rest of the model on a GPU.

    The order is that of `gpu_candidates`, first with experts as they are, then with quantized experts. The list is
    empty for a model without experts.
    """
    if not model.experts.num_bytes:
        return []
    found = gpu_candidates(model.without_experts(), context, device_bytes)
    widths = [None, *model.quantized_weights]
    return [replace(each, weights=bits, experts_on_host=True) for bits in widths for each in found]


def cpu_candidates(model: ModelCost) -> list[Candidate]:
    """The caches to choose from with the model on the CPU, the best quality first; quantized weights come last."""
    ours = tuple(BITS) if model.shapes else ("dynamic",) if model.has_windows else ()
    names = ("dynamic", "quantized-{}")[: len(ours)] or ("stock",)
    return [Candidate(name, Strategy.CPU) for name in ("stock", *ours)] + [
        Candidate(name.format(bits), Strategy.CPU, bits) for bits in model.quantized_weights for name in names
    ]


def _with_most_tokens(model: ModelCost, candidate: Candidate, context: int, device_bytes: int) -> list[Candidate]:
    """The candidate with as many tokens of each layer on the GPU as fit; none if all do, or too few."""
    sizes = range(LEAST_DEVICE_TOKENS, max(context, LEAST_DEVICE_TOKENS) + GRANULE, GRANULE)

    def needed(size: int) -> int:
        each = replace(candidate, device_tokens=size)
        return each.running(model, each.cost(model, context), context).device

    room = (least := needed(sizes[0])) + _USED_SHARE * (device_bytes - least)
    number = bisect_right(sizes, False, key=lambda size: needed(size) > room)
    return [replace(candidate, device_tokens=sizes[number - 1])] if 0 < number < len(sizes) else []


@dataclass(frozen=True)
class Machine:
    """
    The memory that a plan may use.

    Attributes:
        device_bytes: GPU memory; 0 for no GPU.
        host_bytes: host memory.
    """

    device_bytes: int
    host_bytes: int


def this_machine(device_bytes: int | None = None, host_bytes: int | None = None) -> Machine:
    """
    Describe this machine.

    Args:
        device_bytes: GPU memory that a plan may use; `None` for the memory that is free now.
        host_bytes: host memory that a plan may use; `None` for the memory that is free now.
    """
    device_bytes = _free_device_bytes() if device_bytes is None else device_bytes
    return Machine(device_bytes, available_host_bytes() if host_bytes is None else host_bytes)


def default_chunk(on_gpu: bool) -> int:
    """The default `prefill_chunk_size`: on a GPU few tokens, to save memory; on a CPU the fastest number."""
    return 512 if on_gpu else PREFILL_CHUNK_SIZE


def _free_device_bytes() -> int:
    """Free bytes on the current accelerator, torch's reserve included; 0 without one, or if it does not say."""
    if not torch.accelerator.is_available():
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info()
    except RuntimeError:
        return 0
    return free + torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
