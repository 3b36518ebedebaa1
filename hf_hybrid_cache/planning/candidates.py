"""The caches to choose from: how each is made, and what a model with it takes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cache_argument import CACHE_ARGUMENT
from ..codecs import minmax
from ..layers import Placement
from ..storage import KVCodec
from .cost import CacheCost, Held, cache_cost, layer_bytes, stock_cost
from .model_cost import ModelCost
from .speed import Division, Way

# What the process takes besides: Python and its libraries in host memory, CUDA and its libraries on the GPU.
RUNTIME_BYTES = 2**29
# The caches from the best quality to the worst.
BITS: Mapping[str, int | tuple[int, int] | None] = {
    "dynamic": None,
    "quantized-8": 8,
    "quantized-4": 4,
    "quantized-4-2": (4, 2),
    "quantized-2": 2,
}


@dataclass(frozen=True)
class Candidate:
    """
    A cache that could be used.

    Attributes:
        cache: its name: "stock" is transformers' `DynamicCache`; "offloaded", or one of `BITS`.
        way: where it is, and who attends to it.
        weights: bits of a weight where the CPU computes with it; `None` for the weights as they are.
        device_tokens: tokens of each layer on the GPU where others are in host memory, at most.
        cpu_share: of those others, the share that the CPU attends to; the rest is streamed.
        resident_layers: that are on the GPU whole, while others are divided so.
        experts_on_host: all of the model is on the GPU but its experts, which the CPU computes in host memory.
    """

    cache: str
    way: Way
    weights: int | None = None
    device_tokens: int = 0
    cpu_share: float = 0.0
    resident_layers: int = 0
    experts_on_host: bool = False

    @property
    def placement(self) -> Placement:
        """As the prompt needs it."""
        if self.way == Way.BOTH:
            in_part = 0 < self.cpu_share < 1
            cpu_decode = self.cpu_share if in_part else self.cpu_share == 1
            tokens, layers = self.device_tokens, self.resident_layers
            return Placement(True, 1, layers, cpu_decode=cpu_decode, device_tokens=tokens, adapts=in_part)
        streamed = self.way in (Way.STREAMED, Way.CPU_DECODE) or self.cache == "offloaded"
        return Placement(offload=streamed, cpu_decode=True if self.way == Way.CPU_ATTENTION else None)

    @property
    def codec(self) -> KVCodec | None:
        bits = BITS.get(self.cache)
        return None if bits is None else minmax(bits)

    def cost(self, model: ModelCost, context: int) -> CacheCost:
        """What the cache costs; while the CPU decodes, what it held on the GPU is in host memory."""
        on_cpu = self.way == Way.CPU
        if self.cache == "stock":
            return stock_cost(model, context, on_cpu)
        cost = cache_cost(model, self.placement, self.codec, context, on_cpu)
        if self.way == Way.CPU_DECODE:
            later = cache_cost(model, self.placement, self.codec, context, on_cpu=True)
            return replace(cost, decode=later.decode, moved_bytes=later.moved_bytes)
        return cost

    def division(self, model: ModelCost, context: int) -> Division:
        """Of a layer, on average, at the end of the context."""
        on_device = min(self.device_tokens, context)
        middle = context - on_device
        parts = (on_device, None), (middle, self.codec), (middle, None), (context, self.codec)
        device, host, decoded, resident = (
            sum(layer_bytes(shape, codec, tokens) for shape in model.shapes.values()) // len(model.shapes)
            for tokens, codec in parts
        )
        return Division(device, host, decoded, self.cpu_share, self.resident_layers, resident)

    def most(self, model: ModelCost, cost: CacheCost, context: int) -> Held:
        """Bytes at most, at any time, weights and all."""
        running = self.running(model, cost, context)
        return Held(running.device, max(running.host, self.loading_bytes(model)))

    def loading_bytes(self, model: ModelCost) -> int:
        """Bytes of host memory while a model is loaded there, coded matrix by matrix; 0 on the GPU."""
        if self.way != Way.CPU and not self.experts_on_host:
            return 0
        if self.weights is None:
            return model.weight_bytes + RUNTIME_BYTES
        coded = model.coded_weights[self.weights]
        if model.comes_coded:  # such files cannot be coded anew while they are read
            return model.weight_bytes + RUNTIME_BYTES + coded.largest_matrix_bytes
        if self.experts_on_host:
            weights = model.experts.total_bytes(self.weights) + model.without_experts().weight_bytes
        else:
            weights = coded.coded_bytes + coded.other_bytes
        return weights + RUNTIME_BYTES + coded.largest_matrix_bytes

    def running(self, model: ModelCost, cost: CacheCost, context: int) -> Held:
        """Bytes at most once the model is where it computes, weights and all."""
        working = model.working_bytes(context)
        coded = None if self.weights is None else model.coded_weights[self.weights]
        if self.way == Way.CPU:
            weights = model.weight_bytes if coded is None else coded.coded_bytes + coded.other_bytes
            with_cache = max(cost.prefill.host + cost.copied + working, cost.decode.host)
            return Held(0, weights + RUNTIME_BYTES + with_cache)
        weights = model.weight_bytes
        host = max(cost.prefill.host, cost.decode.host) + RUNTIME_BYTES
        if self.experts_on_host:
            weights = model.without_experts().weight_bytes
            # What a chunk takes in between is not known by place: the CPU's part is at most that of the first chunk.
            host += model.experts.total_bytes(self.weights) + model.least_working_bytes
            # Experts cross the bus as they are, one on its way while another is multiplied.
            working += 2 * model.experts.largest_bytes
        elif self.way == Way.CPU_DECODE:
            # Codes are beside the weights as they were, which go back to the GPU.
            host += weights + (0 if coded is None else coded.coded_bytes)
        return Held(weights + RUNTIME_BYTES + max(cost.prefill.device + working, cost.decode.device), host)

    def code(self, model: ModelCost) -> str:
        """Lines of Python that load the model and use the cache."""
        options = ["model.config"]
        if (bits := BITS.get(self.cache)) is not None:
            name = "QuantizedHybridCache"
            options += [f"bits={bits}"] + ["offload=True"] * self.placement.offload
        elif self.cache == "stock":
            name, options = "DynamicCache", ["config=model.config"]
        else:
            name = "OffloadedHybridCache" if self.placement.offload else "DynamicHybridCache"
        if self.way == Way.CPU_ATTENTION:
            options.append("cpu_decode=True")
        elif self.way == Way.BOTH:
            cpu_decode = '"auto"' if self.placement.adapts else self.placement.cpu_decode
            options.append(f"cpu_decode={cpu_decode}")
            options += [f"device_tokens={self.device_tokens}"] if self.device_tokens else []
            options += [f"resident_layers={self.resident_layers}"] if self.resident_layers else []
        classes = ["AutoModelForCausalLM"] + ["DynamicCache"] * (self.cache == "stock")
        ours = [] if self.cache == "stock" else [name]
        ours += ["decode_on_cpu"] * (self.way == Way.CPU_DECODE)
        is_coded = self.weights is not None and (self.way == Way.CPU or self.experts_on_host)
        is_coded_later = is_coded and model.comes_coded
        ours += ["CodedWeightsConfig"] * (is_coded and not is_coded_later)
        ours += ["quantize_weights"] * (is_coded_later and not self.experts_on_host)
        ours += ["move_experts_to_host"] * self.experts_on_host
        loaded_on = "cpu" if self.way == Way.CPU or self.experts_on_host else "cuda"
        loaded = model.name, str(model.dtype).removeprefix("torch."), loaded_on
        model_name, dtype, device = map(json.dumps, loaded)
        generate = ["**inputs", f"{CACHE_ARGUMENT}=cache", "max_new_tokens=200", f"prefill_chunk_size={model.chunk}"]
        if self.way == Way.CPU_DECODE:
            configured = "" if self.weights is None else f".configure(weights={self.weights})"
            generate.append(f"custom_generate=decode_on_cpu{configured}")
        arguments = [model_name, f"dtype={dtype}", f"device_map={device}"]
        if is_coded and not is_coded_later:
            only = ", only_experts=True" if self.experts_on_host else ""
            arguments.append(f"quantization_config=CodedWeightsConfig(bits={self.weights}{only})")
        prepared = [f"quantize_weights(model, {self.weights})"] if is_coded_later and not self.experts_on_host else []
        if self.experts_on_host:
            few_bits = f", bits={self.weights}" if is_coded_later else ""
            prepared = [f"move_experts_to_host(model{few_bits})", 'model.to("cuda")']
        lines = [
            f"from transformers import {', '.join(classes)}",
            *([f"from hf_hybrid_cache import {', '.join(ours)}"] if ours else []),
            "",
            f"model = AutoModelForCausalLM.from_pretrained({', '.join(arguments)})",
            *prepared,
            f"cache = {name}({', '.join(options)})",
            f"model.generate({', '.join(generate)})",
        ]
        return "\n".join(lines)


def gpu_candidates(model: ModelCost) -> list[Candidate]:
    """
    The caches to choose from with the model on a GPU, the best quality first and then the fewest transfers.

    Those with weights of few bits come after all others.
    """
    found = [Candidate("stock", Way.GPU)]
    names = {name: "offloaded" if name == "dynamic" else name for name in BITS} if model.shapes else {}
    for name, streamed in names.items():
        attended = [Candidate(name, Way.CPU_ATTENTION)] if model.has_kernel else []
        found += [Candidate(name, Way.GPU), Candidate(streamed, Way.STREAMED), *attended]
        found += [Candidate(streamed, Way.CPU_DECODE)]
    coded = [Candidate(name, Way.CPU_DECODE, bits) for bits in model.coded_weights for name in names.values()]
    return found + coded


def expert_candidates(model: ModelCost) -> list[Candidate]:
    """
    The caches to choose from with a model's experts in host memory and all else on a GPU.

    In the order of those with all on the GPU, first with experts as they are, then with experts in few bits. None for
    a model without experts.
    """
    if not model.experts.layers:
        return []
    found = [each for each in gpu_candidates(model) if each.way != Way.CPU_DECODE and each.weights is None]
    widths = [None, *model.coded_weights]
    return [replace(each, weights=bits, experts_on_host=True) for bits in widths for each in found]


def cpu_candidates(model: ModelCost) -> list[Candidate]:
    """The caches to choose from with the model on the CPU, the best quality first, in the same order."""
    ours = tuple(BITS) if model.shapes else ()
    coded = [Candidate(name, Way.CPU, bits) for bits in model.coded_weights for name in ours or ("stock",)]
    return [Candidate(name, Way.CPU) for name in ("stock", *ours)] + coded
