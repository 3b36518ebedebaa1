"""
The speed of a cache, measured on this machine with some layers of the model and random weights.

The last layers are made where the plan has them, in its bits, as many as the kinds of layers repeat after. They run
with the plan's cache at the wished context: the first chunk of a prompt, the last one, and decode steps. Keys and
values between the chunks are random, put in through `update`. Embeddings and output head also run without layers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..decode_phase.moving import HOST
from ..decode_step import fuse_where_known
from ..errors import HybridCacheError
from ..storage import KVShape, Pair
from ..weights import move_experts_to_host, quantize_weights
from .candidates import Candidate, Strategy, this_machine
from .model_cost import ModelCost, model_on_meta

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
        return _Layers(config, model, candidate, context).measured()
    except (HybridCacheError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any exception: this runs the code of any model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise MeasureError(f"Layers of {model.name} do not run alone, so do not measure: {reason}") from error


class _Layers:
    """A model of the last layers, with random weights, that is to be measured; arguments are those of `measure`."""

    def __init__(self, config: PreTrainedConfig, model: ModelCost, candidate: Candidate, context: int):
        self._cost, self._candidate, self._context = model, candidate, context
        self._device = _device_of(candidate)
        self._model: Any = model_on_meta(config, model.dtype)
        self._layers = _layers_of(self._model)
        self._of_model = len(self._layers)
        last = self._last_layers()
        self._shapes = [model.shapes[index] if index in model.shapes else model.others[index].shape for index in last]
        self._keep_layers(last)
        self._vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        self._options = {"logits_to_keep": 1} if self._model._supports_logits_to_keep() else {}
        self._prompt = max(1, min(context, model.max_context - _MOST_STEPS - _WARM_UP_STEPS))
        self._first = min(model.chunk, self._prompt)
        self._last = min(model.chunk, self._prompt - self._first)
        _fill_weights(self._model, HOST if candidate.experts_on_host else self._device)
        if candidate.experts_on_host:
            move_experts_to_host(self._model, candidate.weights)
            self._model.to(self._device)
        elif candidate.weights is not None:
            quantize_weights(self._model, candidate.weights)

    def _last_layers(self) -> range:
        """The last layers, as often as their kinds repeat, that keep weights out of the processor's caches."""
        text, number = self._model.config.get_text_config(decoder=True), self._of_model
        types = getattr(text, "layer_types", None) or [None] * number
        kinds = [
            (types[index], [(name, weight.shape) for name, weight in layer.named_parameters()])
            for index, layer in enumerate(self._layers)
        ]
        half = kinds[number // 2 :]  # some models begin with layers of another kind
        period = next(size for size in range(1, len(half) + 1) if half[size:] == half[:-size])
        counted = range(number - period, number)
        weights = sum(weight.numel() for index in counted for weight in self._layers[index].parameters())
        num_bytes = weights * (self._candidate.weights or 8 * self._cost.dtype.itemsize) / 8
        placement, full = self._candidate.placement, sum(index in self._cost.shapes for index in counted)
        # Of fewer layers, streamed ones would stay on the device.
        least = (placement.prefetch_layers + 2) / max(1, full) if placement.offload else 1.0
        times = math.ceil(max(least, _LEAST_BYTES / num_bytes))
        return range(max(0, number - times * period), number)

    def _keep_layers(self, indices: range) -> None:
        """Let the model have some of its layers only, with numbers from 0 on."""
        layers, text = self._layers, self._model.config.get_text_config(decoder=True)
        for name, value in [*vars(text).items()]:
            if isinstance(value, list) and len(value) == len(layers):  # of each layer
                setattr(text, name, [value[index] for index in indices])
        text.num_hidden_layers = len(indices)
        del layers[: indices.start]
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if "layer_idx" in vars(module):
                    vars(module)["layer_idx"] = number

    @torch.no_grad()
    def measured(self) -> Measured:
        """Measure the layers, and the model without them; the rest is as many times that of one layer."""
        model, rows, chunks = self._cost, self._cost.batch, (self._first, self._last)
        with self._without_layers():
            self._run(rows, 1)
            fixed = [_seconds(partial(self._run, rows, tokens)) for tokens in chunks]
        if self._device == HOST and self._candidate.cache != "stock":
            fuse_where_known(self._model)
        cache = self._new_cache()
        for number in (*[min(_WARM_UP_TOKENS, self._first)] * 2, *[1] * _WARM_UP_STEPS):
            self._run(rows, number, cache)
        cache = self._new_cache()
        together = [_seconds(partial(self._run, rows, self._first, cache))]
        self._fill(cache, rows, self._prompt - self._first - self._last)
        together.append(_seconds(partial(self._run, rows, self._last, cache)))
        for _ in range(_WARM_UP_STEPS):
            self._run(rows, 1, cache)
        together.append(_median_seconds(partial(self._run, rows, 1, cache)))
        with self._without_layers():
            fixed.append(_median_seconds(partial(self._run, rows, 1)))
        of_layers = np.maximum(0.0, np.subtract(together, fixed)) * self._of_model / len(self._layers)
        first, last, step = (fixed + of_layers).tolist()
        num_chunks = self._context / model.chunk
        prompt = (first + last) / 2 * num_chunks if num_chunks >= 2 else first + last
        return Measured(prompt, step, len(self._layers))

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        """Let the model have embeddings and output head alone, which goes on as after the pass before."""
        kept, own = [*self._layers], vars(self._model.get_decoder())
        forward = own.pop("forward", None)
        del self._layers[:]
        yield
        self._layers.extend(kept)
        if forward is not None:
            own["forward"] = forward

    def _new_cache(self) -> Cache:
        if self._candidate.cache == "stock":
            return DynamicCache(config=self._model.config)
        return HybridCache(self._model.config, self._candidate.placement, codec=self._candidate.codec)

    def _run(self, rows: int, num_tokens: int, cache: Cache | None = None) -> None:
        """Run random tokens through the model, after those in a cache."""
        if num_tokens:
            ids = torch.randint(self._vocabulary, (rows, num_tokens), device=self._device)
            self._model(ids, use_cache=cache is not None, **self._options, **cache_argument(cache))

    def _fill(self, cache: Cache, rows: int, num_tokens: int) -> None:
        """Put random keys and values of so many tokens into all layers that have some."""
        states: dict[KVShape, Pair] = {}
        for start in range(0, num_tokens, _FILLED_AT_ONCE):
            size = min(_FILLED_AT_ONCE, num_tokens - start)
            for number, shape in enumerate(self._shapes):
                if shape is not None:
                    shape = shape._replace(batch=rows, device=self._device)
                    if shape not in states:
                        states[shape] = shape.empty(min(_FILLED_AT_ONCE, num_tokens))
                        for each in states[shape]:
                            each.normal_()
                    keys, values = (each[:, :, :size] for each in states[shape])
                    cache.update(keys, values, number)


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


def _layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    children = model.get_decoder().children()
    return next(each for each in children if isinstance(each, nn.ModuleList) and len(each) in (number, 0))


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
