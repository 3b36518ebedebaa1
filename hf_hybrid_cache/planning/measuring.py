"""
The speed of a cache, measured on this machine with some layers of the model and random weights.

Of each kind of layers some are made where the plan has them, in its bits, and run with its cache at the wished context:
the first chunk of a prompt, the last one, and decode steps. Keys and values between the chunks are random, put in
through `update`. Embeddings and output head run without layers, once.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..decode_phase.moving import copy_to_host
from ..decode_step import fuse_where_known
from ..errors import HybridCacheError
from ..layers import HOST
from ..storage import KVShape
from ..weights import Width, move_experts_to_host, quantize_weights
from .candidates import Candidate, Strategy
from .machine import this_machine
from .model_cost import META, ModelCost

# Weights of so many bytes do not stay in the processor's caches from one step to the next.
_LEAST_BYTES = 2**27
_WARM_UP_TOKENS, _WARM_UP_STEPS = 300, 2
_MOST_STEPS, _MOST_SECONDS = 32, 2.0
_FILLED_AT_ONCE = 8192
_WEIGHTS_AT_ONCE, _LARGEST_WEIGHT = 2**20, 0.035  # a standard deviation of 0.02


class MeasureError(HybridCacheError, RuntimeError):
    """A plan cannot be measured on this machine; the message says why, and the way out."""


@dataclass(frozen=True)
class Measured:
    """
    The speed of a cache on this machine, from some of the model's layers.

    Attributes:
        seconds_to_first_token: of reading the prompt: the mean of its first and its last chunk, times their number.
        seconds_per_token: of a decode step at the end of the context, the median of some.
        layers: number of layers that were run.
    """

    seconds_to_first_token: float
    seconds_per_token: float
    layers: int


def measure(config: PreTrainedConfig, model: ModelCost, candidate: Candidate, context: int) -> Measured:
    """
    Measure a cache with some layers of the model; on a CPU it takes some 20 seconds.

    Whatever else runs on the machine meanwhile counts, too.

    Args:
        config: of the model.
        model: its cost, which has the type of its weights, the number of sequences, and the size of a chunk.
        candidate: the cache, and where it is.
        context: number of tokens of each sequence.

    Raises:
        MeasureError: the machine has no such device or too little memory, or layers of the model do not run alone.
    """
    if candidate.strategy == Strategy.CPU_DECODE:
        read = measure(config, model, replace(candidate, strategy=Strategy.STREAMED, weights=None), context)
        on_cpu, few_tokens = replace(candidate, strategy=Strategy.CPU), replace(model, chunk=_WARM_UP_TOKENS)
        decoded = measure(config, few_tokens, on_cpu, context)
        copied = _seconds_to_copy(config, model, candidate, context)
        return replace(decoded, seconds_to_first_token=read.seconds_to_first_token + copied)
    needed, free = candidate.most(model, candidate.cost(model, context), context), this_machine()
    # Some devices do not say what is free.
    if needed.host > free.host_bytes or needed.device > (free.device_bytes or needed.device):
        on_device, on_host, free_device, free_host = (f"{size / 2**30:.1f}" for size in (*needed, *astuple(free)))
        raise MeasureError(
            f"{context:,} tokens of {model.name} with {candidate.cache}, {candidate.strategy}, need {on_device} GiB of "
            f"GPU memory and {on_host} GiB of host memory, and {free_device} and {free_host} are free here. Use a "
            "shorter context, measure on a larger machine, or do not measure."
        )
    try:
        total, layers = _times(config, model, candidate, context)
    except (HybridCacheError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any exception: this runs the code of any model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise MeasureError(f"Layers of {model.name} do not run alone, so do not measure: {reason}") from error
    first, last, step = total.tolist()
    chunks = model.prompt_tokens(context) / model.chunk
    return Measured((first + last) / 2 * chunks if chunks >= 2 else first + last, step, layers)


def _times(config: PreTrainedConfig, model: ModelCost, candidate: Candidate, context: int) -> tuple[np.ndarray, int]:
    """Seconds of the first chunk, the last chunk and a decode step of all layers, and the number of those that ran."""
    total, ran = np.zeros(3), 0
    kinds = _kinds_of_layers(config, model)
    for kind in kinds:
        if kind[0] in model.shapes or kinds[0][0] not in model.shapes:
            fixed, together, number = _Layers(config, model, candidate, context, kind).times()
        else:
            # Without a layer of full attention nobody counts tokens. Those of other layers do not depend on the end.
            counting = kinds[0][:1]
            _, fixed, _ = _Layers(config, model, candidate, context, counting, to_end=False).times()
            _, together, number = _Layers(config, model, candidate, context, kind, counting, to_end=False).times()
        if kind is kinds[0]:
            total = fixed
        total = total + len(kind) * np.maximum(0.0, together - fixed) / number
        ran += number
    return total, ran


class _Layers:
    """
    A model of some layers of one kind, with random weights, that is to be measured.

    Args:
        config: see `measure`.
        model: see `measure`.
        candidate: see `measure`.
        context: see `measure`.
        kind: indices of the layers of the kind, of which the first ones run.
        beside: indices of layers that run, too.
        to_end: whether the cache is filled up to the context between the first two chunks.

    Attributes:
        made: the model.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        model: ModelCost,
        candidate: Candidate,
        context: int,
        kind: Sequence[int],
        beside: Sequence[int] = (),
        to_end: bool = True,
    ):
        self._cost, self._candidate, self._context, self._to_end = model, candidate, context, to_end
        self._device = _device_of(candidate)
        self.made: Any = _on_meta(config, model.dtype)
        bits = sum(weight.numel() for weight in _layers_of(self.made)[kind[0]].parameters())
        bits *= candidate.weights or 8 * model.dtype.itemsize
        placement = candidate.placement
        # Of fewer layers, streamed ones would stay on the device.
        least = placement.prefetch_layers + 2 if placement.offload else 2
        self._number = min(len(kind), max(least, math.ceil(8 * _LEAST_BYTES / bits)))
        indices = [*beside, *kind[: self._number]]
        self._shapes = [model.shapes.get(index) for index in indices]
        _keep_layers(self.made, indices)
        self._vocabulary = self.made.config.get_text_config(decoder=True).vocab_size
        self._options = {"logits_to_keep": 1} if self.made._supports_logits_to_keep() else {}
        prompt = min(model.prompt_tokens(context), model.max_context - _MOST_STEPS - _WARM_UP_STEPS)
        self._prompt = max(1, prompt)
        self._first = min(model.chunk, self._prompt)
        self._last = min(model.chunk, self._prompt - self._first)
        if not to_end:
            self._prompt = self._first + self._last
        _fill_weights(self.made, HOST if candidate.experts_on_host else self._device)
        if candidate.experts_on_host:
            move_experts_to_host(self.made, candidate.weights)
            self.made.to(self._device)
        elif candidate.weights is not None:
            quantize_weights(self.made, candidate.weights)

    @torch.no_grad()
    def times(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Seconds without layers, seconds with all of them and a cache, and the number of layers of the kind."""
        return self._without_layers(), self._with_cache(), self._number

    def _without_layers(self) -> np.ndarray:
        """Seconds of the first chunk, the last chunk and a decode step, of embeddings and output head alone."""
        layers = _layers_of(self.made)
        kept = [*layers]
        del layers[:]
        rows = self._cost.batch
        self._run(rows, 1)
        chunks = [_seconds(partial(self._run, rows, tokens)) for tokens in (self._first, self._last)]
        step = _median_seconds(partial(self._run, rows * self._cost.continuations, 1))
        layers.extend(kept)
        return np.array([*chunks, step])

    def _with_cache(self) -> np.ndarray:
        """Seconds of the first chunk, the last chunk and a decode step, at the end of the context."""
        if self._device == HOST and self._candidate.cache != "stock":
            fuse_where_known(self.made)
        rows, tokens = self._cost.batch, min(_WARM_UP_TOKENS, self._first)
        cache = self._new_cache()
        for number in (tokens, tokens, *[1] * _WARM_UP_STEPS):
            self._run(rows, number, cache)
        cache = self._new_cache()
        first = _seconds(partial(self._run, rows, self._first, cache))
        self._fill(cache, rows, self._prompt - self._first - self._last)
        last = _seconds(partial(self._run, rows, self._last, cache))
        if self._cost.continuations > 1:
            rows *= self._cost.continuations
            cache.batch_repeat_interleave(self._cost.continuations)
            self._fill(cache, rows, self._context - self._cost.prompt_tokens(self._context) if self._to_end else 0)
        for _ in range(_WARM_UP_STEPS):
            self._run(rows, 1, cache)
        return np.array([first, last, _median_seconds(partial(self._run, rows, 1, cache))])

    def _new_cache(self) -> Cache:
        if self._candidate.cache == "stock":
            return DynamicCache(config=self.made.config)
        return HybridCache(self.made.config, self._candidate.placement, codec=self._candidate.codec)

    def _run(self, rows: int, num_tokens: int, cache: Cache | None = None) -> None:
        """Run random tokens through the model, after those in a cache."""
        if num_tokens:
            ids = torch.randint(self._vocabulary, (rows, num_tokens), device=self._device)
            self.made(ids, use_cache=cache is not None, **self._options, **cache_argument(cache))

    def _fill(self, cache: Cache, rows: int, num_tokens: int) -> None:
        """Put random keys and values of so many tokens into all layers that have some."""
        states: dict[KVShape, tuple[torch.Tensor, torch.Tensor]] = {}
        for start in range(0, num_tokens, _FILLED_AT_ONCE):
            size = min(_FILLED_AT_ONCE, num_tokens - start)
            for number, shape in enumerate(self._shapes):
                layer: Any = cache.layers[number]
                if shape is None and isinstance(layer, DynamicLayer) and layer.is_initialized:
                    held: tuple[Any, Any] = layer.keys, layer.values
                    shape = KVShape.of(*held)
                if shape is not None:
                    shape = shape._replace(batch=rows, device=self._device)
                    if shape not in states:
                        states[shape] = _random_states(shape, min(_FILLED_AT_ONCE, num_tokens))
                    keys, values = (each[:, :, :size] for each in states[shape])
                    cache.update(keys, values, number)


def _random_states(shape: KVShape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of so many tokens."""
    keys, values = (
        torch.randn(shape.batch, shape.num_kv_heads, num_tokens, width, dtype=dtype, device=shape.device)
        for width, dtype in ((shape.key_dim, shape.key_dtype), (shape.value_dim, shape.value_dtype))
    )
    return keys, values


def _device_of(candidate: Candidate) -> torch.device:
    """The device where the model is with a candidate."""
    if candidate.strategy == Strategy.CPU:
        return HOST
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        raise MeasureError(
            f"{candidate.cache}, {candidate.strategy}, cannot be measured: this machine has no GPU that torch can use. "
            "Measure on the machine that has one, plan for none (--gpu-memory 0), or do not measure."
        )
    return accelerator


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model of a config, without data."""
    with torch.device(META):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def _layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    children = model.get_decoder().children()
    return next(each for each in children if isinstance(each, nn.ModuleList) and len(each) in (number, 0))


def _kinds_of_layers(config: PreTrainedConfig, model: ModelCost) -> list[list[int]]:
    """Indices of the layers of each kind: those with equal parameters and an equal type; full attention comes first."""
    made = _on_meta(config, model.dtype)
    layers = _layers_of(made)
    types = getattr(made.config.get_text_config(decoder=True), "layer_types", None) or [None] * len(layers)
    kinds = defaultdict(list)
    for index, layer in enumerate(layers):
        parameters = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        kinds[types[index], index in model.shapes, parameters].append(index)
    return sorted(kinds.values(), key=lambda indices: indices[0] not in model.shapes)


def _keep_layers(model: Any, indices: Sequence[int]) -> None:
    """Let a model have some of its layers only, with numbers from 0 on."""
    layers, text = _layers_of(model), model.config.get_text_config(decoder=True)
    kept = [layers[index] for index in indices]
    for name, value in [*vars(text).items()]:
        if isinstance(value, list) and len(value) == len(layers):  # of each layer
            setattr(text, name, [value[index] for index in indices])
    text.num_hidden_layers = len(kept)
    del layers[:]
    layers.extend(kept)
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = number


def _fill_weights(model: Any, device: torch.device) -> None:
    """Give a model on the meta device random weights, and the buffers that its own code computes."""
    model.to_empty(device=device)
    model.tie_weights()
    numbers = torch.empty(_WEIGHTS_AT_ONCE, dtype=model.dtype, device=device)
    numbers.uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)
    for weight in model.parameters():
        if weight.ndim > 1:
            for part in weight.detach().view(-1).split(_WEIGHTS_AT_ONCE):
                part.copy_(numbers[: len(part)])
            weight._is_hf_initialized = True  # otherwise `init_weights` draws each number, which takes long
    model.init_weights()


def _seconds_to_copy(config: PreTrainedConfig, model: ModelCost, candidate: Candidate, context: int) -> float:
    """Seconds in which `DecodeOnCPU` copies all weights to host memory, and quantizes them."""
    on_device = replace(candidate, strategy=Strategy.STREAMED, weights=None)
    made = _Layers(config, model, on_device, context, _kinds_of_layers(config, model)[0]).made
    width = None if candidate.weights is None else Width.checked(candidate.weights)
    seconds = _seconds(lambda: copy_to_host(made, None, width))
    return seconds * model.weight_bytes / sum(weight.nbytes for weight in made.parameters())


def _seconds(action: Callable[[], object]) -> float:
    """Seconds of an action, to the end of what it has given an accelerator to do."""
    start = perf_counter()
    action()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter() - start


def _median_seconds(action: Callable[[], object]) -> float:
    """The median of some runs of an action."""
    end, seconds = perf_counter() + _MOST_SECONDS, [_seconds(action)]
    while perf_counter() < end and len(seconds) < _MOST_STEPS:
        seconds.append(_seconds(action))
    return median(seconds)
