"""The caches to choose from: the code that makes each, and the memory that a model with it needs."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cache_argument import CACHE_ARGUMENT
from ..codecs import minmax
from ..layers import Placement
from ..storage import KVCodec
from .continuations import continued_cost, continued_stock_cost
from .cost import CacheCost, Held, cache_cost, layer_bytes, stock_cost
from .model_cost import ModelCost
from .prediction import Division, Strategy

# Python and its libraries in host memory, CUDA and its libraries on the GPU.
RUNTIME_BYTES = 2**29
# Of a token of each sequence: its id, position and mask, copied as answers grow; and of each pair of tokens, its masks.
_ID_BYTES, _PAIR_BYTES = 32, 4
# Bits of keys and values by name of a cache, the best quality first.
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
    A cache that could be used, with the way to run the model.

    Attributes:
        cache: its name: "stock" for transformers' `DynamicCache`, "offloaded", or one of `BITS`.
        strategy: where keys and values are, and whether GPU or CPU computes attention and decodes.
        weights: bits of the weights that the CPU multiplies; `None` for the weights as they are.
        device_tokens: with `Strategy.BOTH`, the most tokens of each layer on the GPU; the others are in host memory.
        cpu_fraction: the share of the tokens in host memory that the CPU attends to; the others are streamed.
        resident_layers: number of layers that are wholly on the GPU, while the others are divided.
        experts_on_host: the experts are in host memory and the CPU computes them; the rest of the model is on the GPU.
    """

    cache: str
    strategy: Strategy
    weights: int | None = None
    device_tokens: int = 0
    cpu_fraction: float = 0.0
    resident_layers: int = 0
    experts_on_host: bool = False

    @property
    def placement(self) -> Placement:
        """The placement of the cache during the prefill."""
        if self.strategy == Strategy.BOTH:
            in_part = 0 < self.cpu_fraction < 1
            cpu_decode = self.cpu_fraction if in_part else self.cpu_fraction == 1
            tokens, layers = self.device_tokens, self.resident_layers
            return Placement(True, 1, layers, cpu_decode=cpu_decode, device_tokens=tokens, adapts=in_part)
        streamed = self.strategy in (Strategy.STREAMED, Strategy.CPU_DECODE) or self.cache == "offloaded"
        return Placement(offload=streamed, cpu_decode=True if self.strategy == Strategy.CPU_ATTENTION else None)

    @property
    def codec(self) -> KVCodec | None:
        bits = BITS.get(self.cache)
        return None if bits is None else minmax(bits)

    def cost(self, model: ModelCost, context: int) -> CacheCost:
        """The cost of the cache at `context` tokens; with `CPU_DECODE` it is in host memory while decoding."""
        on_cpu = self.strategy == Strategy.CPU
        is_continued = model.continuations > 1
        if self.cache == "stock":
            return (continued_stock_cost if is_continued else stock_cost)(model, context, on_cpu)
        cost = (continued_cost if is_continued else cache_cost)(model, self.placement, self.codec, context, on_cpu)
        if self.strategy == Strategy.CPU_DECODE:
            # The GPU reads the prompt's last token for all sequences, so the CPU gets copies.
            model = model.repeated()
            later = cache_cost(model, self.placement, self.codec, context, on_cpu=True)
            while_read = Held(max(cost.prefill.device, cost.decode.device), cost.prefill.host)
            return replace(cost, prefill=while_read, decode=later.decode, moved_bytes=later.moved_bytes)
        return cost

    def division(self, model: ModelCost, context: int) -> Division:
        """The division of an average layer between GPU and host memory, at `context` tokens."""
        on_device = min(self.device_tokens, context)
        middle = context - on_device
        parts = (on_device, None), (middle, self.codec), (middle, None), (context, self.codec)
        device, host, decoded, resident = (
            sum(layer_bytes(shape, codec, tokens) for shape in model.shapes.values()) // len(model.shapes)
            for tokens, codec in parts
        )
        return Division(device, host, decoded, self.cpu_fraction, self.resident_layers, resident)

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
        if model.comes_quantized:  # such files cannot be quantized again while they are read
            return model.weight_bytes + RUNTIME_BYTES + quantized.largest_matrix_bytes
        if self.experts_on_host:
            weights = model.experts.total_bytes(self.weights) + model.without_experts().weight_bytes
        else:
            weights = quantized.quantized_bytes + quantized.other_bytes
        return weights + RUNTIME_BYTES + quantized.largest_matrix_bytes

    def running(self, model: ModelCost, cost: CacheCost, context: int) -> Held:
        """The most bytes that model, cache and process hold once the model is loaded."""
        working = model.working_bytes(context)
        quantized = None if self.weights is None else model.quantized_weights[self.weights]
        if self.strategy == Strategy.CPU:
            weights = model.weight_bytes if quantized is None else quantized.quantized_bytes + quantized.other_bytes
            with_cache = max(cost.prefill.host + cost.copied + working, cost.decode.host)
            return Held(0, weights + RUNTIME_BYTES + with_cache)
        weights = model.weight_bytes
        host = max(cost.prefill.host, cost.decode.host) + RUNTIME_BYTES
        if self.experts_on_host:
            weights = model.without_experts().weight_bytes
            # The CPU's part of the activations is not known; it is at most that of the first chunk.
            host += model.experts.total_bytes(self.weights) + model.least_working_bytes
            # Two experts, not quantized, are on the GPU: one is copied while the other is multiplied.
            working += 2 * model.experts.largest_bytes
        elif self.strategy == Strategy.CPU_DECODE:
            # The original weights stay in host memory beside the codes, because they go back to the GPU.
            host += weights + (0 if quantized is None else quantized.quantized_bytes)
        return Held(weights + RUNTIME_BYTES + max(cost.prefill.device + working, cost.decode.device), host)

    def most_continuations(self, model: ModelCost, context: int, free: Held, most: int) -> int:
        """
        Count the sequences that can continue a prompt together in free memory; at least 1, and at most `most`.

        Args:
            model: its cost; `chunk` tokens of each sequence are read at once, and `own_tokens` follow the prompt.
            context: number of tokens of each sequence.
            free: bytes besides those of the model, and of the cache with the prompt.
            most: sequences at most.
        """
        prompt = self.cost(replace(model, continuations=1), max(1, context - model.own_tokens)).decode
        of_each = model.least_working_bytes + context * (_ID_BYTES + model.chunk * _PAIR_BYTES)

        def is_too_much(number: int) -> bool:
            held, working = self.cost(replace(model, continuations=number), context).decode, number * of_each
            on_device, on_host = (0, working) if self.strategy == Strategy.CPU else (working, 0)
            is_short_of_host = held.host - prompt.host + on_host > free.host
            return is_short_of_host or held.device - prompt.device + on_device > free.device

        return 1 + bisect_left(range(2, most + 1), True, key=is_too_much)

    def code(self, model: ModelCost) -> str:
        """A Python program that loads the model and generates with the cache."""
        options = ["model.config"]
        bits = BITS.get(self.cache)
        if bits is not None:
            name = "QuantizedHybridCache"
            options += [f"bits={bits}"] + ["offload=True"] * self.placement.offload
        elif self.cache == "stock":
            name, options = "DynamicCache", ["config=model.config"]
        else:
            name = "OffloadedHybridCache" if self.placement.offload else "DynamicHybridCache"
        if self.strategy == Strategy.CPU_ATTENTION:
            options.append("cpu_decode=True")
        elif self.strategy == Strategy.BOTH:
            cpu_decode = '"auto"' if self.placement.adapts else self.placement.cpu_decode
            options.append(f"cpu_decode={cpu_decode}")
            options += [f"device_tokens={self.device_tokens}"] if self.device_tokens else []
            options += [f"resident_layers={self.resident_layers}"] if self.resident_layers else []
        classes = ["AutoModelForCausalLM"] + ["DynamicCache"] * (self.cache == "stock")
        ours = [] if self.cache == "stock" else [name]
        if bits is not None and self.resident_layers:
            name, ours = "HybridCache", ["HybridCache", "Placement", "minmax"]
            options = ["model.config", self._placement_code(), f"codec=minmax({bits})"]
        ours += ["DecodeOnCPU"] * (self.strategy == Strategy.CPU_DECODE)
        is_quantized = self.weights is not None and (self.strategy == Strategy.CPU or self.experts_on_host)
        is_quantized_later = is_quantized and model.comes_quantized
        ours += ["QuantizedWeightsConfig"] * (is_quantized and not is_quantized_later)
        ours += ["quantize_weights"] * (is_quantized_later and not self.experts_on_host)
        ours += ["move_experts_to_host"] * self.experts_on_host
        loaded_on = "cpu" if self.strategy == Strategy.CPU or self.experts_on_host else "cuda"
        loaded = model.name, str(model.dtype).removeprefix("torch."), loaded_on
        model_name, dtype, device = map(json.dumps, loaded)
        generate = ["**inputs", f"{CACHE_ARGUMENT}=cache", "max_new_tokens=200", f"prefill_chunk_size={model.chunk}"]
        if model.continuations > 1:
            generate += ["do_sample=True", f"num_return_sequences={model.continuations}"]
        if self.strategy == Strategy.CPU_DECODE:
            options_of_weights = "" if self.weights is None else f"weights={self.weights}"
            generate.append(f"custom_generate=DecodeOnCPU({options_of_weights})")
        arguments = [model_name, f"dtype={dtype}", f"device_map={device}"]
        if is_quantized and not is_quantized_later:
            only = ", only_experts=True" if self.experts_on_host else ""
            arguments.append(f"quantization_config=QuantizedWeightsConfig(bits={self.weights}{only})")
        prepared = (
            [f"quantize_weights(model, {self.weights})"] if is_quantized_later and not self.experts_on_host else []
        )
        if self.experts_on_host:
            few_bits = f", bits={self.weights}" if is_quantized_later else ""
            prepared = [f"move_experts_to_host(model{few_bits})", 'model.to("cuda")']
        read = [
            f'prefill(model, inputs["input_ids"][:, :-1], cache, chunk_size={model.chunk})',
            f"cache.batch_repeat_interleave({model.continuations})",
        ]
        ours += ["prefill"] * (model.continuations > 1)
        lines = [
            f"from transformers import {', '.join(classes)}",
            *([f"from hf_hybrid_cache import {', '.join(sorted(ours))}"] if ours else []),
            "",
            f"model = AutoModelForCausalLM.from_pretrained({', '.join(arguments)})",
            *prepared,
            f"cache = {name}({', '.join(options)})",
            *(read if model.continuations > 1 else []),
            f"model.generate({', '.join(generate)})",
        ]
        return "\n".join(lines)

    def _placement_code(self) -> str:
        """The placement, without what is the default."""
        given, default = vars(self.placement), vars(Placement())
        options = [f"{name}={value!r}" for name, value in given.items() if value != default[name]]
        return f"Placement({', '.join(options)})"


def gpu_candidates(model: ModelCost) -> list[Candidate]:
    """
    The caches to choose from with the model on a GPU: the best quality first, then the fewest transfers.

    Candidates with quantized weights come last.
    """
    found = [Candidate("stock", Strategy.GPU)]
    names = {name: "offloaded" if name == "dynamic" else name for name in BITS} if model.shapes else {}
    for name, streamed in names.items():
        attended = [Candidate(name, Strategy.CPU_ATTENTION)] if model.has_kernel else []
        found += [Candidate(name, Strategy.GPU), Candidate(streamed, Strategy.STREAMED), *attended]
        found += [Candidate(streamed, Strategy.CPU_DECODE)]
    quantized = [
        Candidate(name, Strategy.CPU_DECODE, bits) for bits in model.quantized_weights for name in names.values()
    ]
    return found + quantized


def expert_candidates(model: ModelCost) -> list[Candidate]:
    """
    The caches to choose from with the experts in host memory and the rest of the model on a GPU.

    The order is that of `gpu_candidates`, first with experts as they are, then with quantized experts. The list is
    empty for a model without experts.
    """
    if not model.experts.layers:
        return []
    found = [each for each in gpu_candidates(model) if each.strategy != Strategy.CPU_DECODE and each.weights is None]
    widths = [None, *model.quantized_weights]
    return [replace(each, weights=bits, experts_on_host=True) for bits in widths for each in found]


def cpu_candidates(model: ModelCost) -> list[Candidate]:
    """The caches to choose from with the model on the CPU, the best quality first; quantized weights come last."""
    ours = tuple(BITS) if model.shapes else ()
    quantized = [Candidate(name, Strategy.CPU, bits) for bits in model.quantized_weights for name in ours or ("stock",)]
    return [Candidate(name, Strategy.CPU) for name in ("stock", *ours)] + quantized
