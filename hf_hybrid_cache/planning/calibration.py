"""
Measuring the speeds of a machine: products with weights, the layers of a model, and caches of one layer.

A matrix is read before each timed operation, as a model does between two layers, so that the processor's caches do not
hold what is timed. Keys and values are random and have the shape of Llama 3.2-1B: 8 KV heads of 64, 4 queries each.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

from ..cache_argument import cache_argument
from ..layers import HybridLayer, LayerStores
from ..other_processes import OtherProcesses
from ..storage import InitialCapacity, KVShape, can_page_lock, is_accelerator, require_host_bytes
from ..weights import WEIGHT_BITS, Covered, Width
from .candidates import BITS, Candidate
from .cost import layer_bytes
from .machine import CacheSpeed, DeviceSpeed, Speeds, WeightSpeed
from .prediction import Strategy

HOST = torch.device("cpu")
# On a quiet machine samples differ by a tenth, and other processes use a twentieth of the processor.
_MOST_DISAGREEMENT = 1.5
_MOST_USED_BY_OTHERS = 0.15
_MATRIX = (8192, 4096)
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 64
_BUS_BYTES = 2**28


@dataclass(frozen=True)
class CalibrationBudget:
    """
    The size of a calibration.

    Attributes:
        matrices: number of matrices of 4096 by 8192 weights; together they must not fit the processor's caches.
        contexts: numbers of tokens in the caches, the smallest first, for dtypes of two bytes; half as many for four.
        chunk: number of tokens of a prompt in one forward pass.
        layers: number of layers of the model that is timed for `layer_seconds`.
        rounds: number of rounds; medians are taken over them.
    """

    matrices: int = 8
    # Just above the second, the C library maps new memory for every tensor, and DynamicCache waits for it.
    contexts: tuple[int, ...] = (4096, 32_000, 131_072)
    chunk: int = 512
    layers: int = 8
    rounds: int = 5


@dataclass(frozen=True)
class Calibration:
    """
    The result of a calibration.

    Attributes:
        speeds: of the machine.
        doubt: one sentence that says why the speeds may be too low; `None` if there is no reason to think so.
    """

    speeds: Speeds
    doubt: str | None


def calibrate(dtype: torch.dtype, budget: CalibrationBudget | None = None) -> Calibration:
    """
    Measure the CPU, and the current CUDA device if there is one, with models of `dtype`.

    The first calibration on a machine also compiles kernels.

    Raises:
        HostMemoryError: host memory would not suffice.
    """
    others = OtherProcesses()
    speeds, reading = _measured(dtype, budget or CalibrationBudget())
    return Calibration(speeds, doubt(reading, others.processors() / (psutil.cpu_count() or 1)))


def doubt(reading: Sequence[float], used_by_others: float) -> str | None:
    """
    The reason why measured speeds may be too low; `None` if there is none.

    Args:
        reading: seconds of reading the same weights at several moments.
        used_by_others: the share of the processor's time that other processes used.
    """
    if used_by_others > _MOST_USED_BY_OTHERS:
        return f"other processes used {100 * used_by_others:.0f}% of the processor meanwhile"
    if max(reading) > _MOST_DISAGREEMENT * min(reading):
        return f"reading the same weights took {min(reading):.3f} s at one moment and {max(reading):.3f} s at another"
    return None


def _measured(dtype: torch.dtype, budget: CalibrationBudget) -> tuple[Speeds, list[float]]:
    """The speeds, and the seconds of each reading of the weights by the CPU."""
    states = 2 * _KV_HEADS * _HEAD_DIM * sum(budget.contexts) * 2
    # The codes of all widths together take less than two bytes a weight.
    num_bytes = budget.matrices * _MATRIX[0] * _MATRIX[1] * (dtype.itemsize + 2) + (len(BITS) + 2) * states
    require_host_bytes(num_bytes, "Measuring speeds needs")
    host, reading = _device_speed(HOST, dtype, budget)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return Speeds(host), reading
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return Speeds(host, _device_speed(device, dtype, budget)[0], *_bus_speed(device, budget.rounds)), reading


@torch.inference_mode()
def _device_speed(
    device: torch.device, dtype: torch.dtype, budget: CalibrationBudget
) -> tuple[DeviceSpeed, list[float]]:
    contexts = [num_tokens * 2 // dtype.itemsize for num_tokens in budget.contexts]
    weights = _Weights.plain(device, dtype, budget.matrices)
    quantized = {bits: weights.quantized(bits) for bits in WEIGHT_BITS if device == HOST}
    layers: dict[tuple[str, int], _Layer] = {}
    for num_tokens in contexts:
        states = _random_states(_KV_HEADS, num_tokens, device, dtype)
        layers |= {(name, num_tokens): _Layer(name, states) for name in ("stock", *BITS)}
    del states
    model = _Model(device, dtype, budget.layers, weights)
    samples: dict[Any, list[float]] = defaultdict(list)
    for turn in range(budget.rounds + 1):
        if turn == 1:
            samples.clear()  # the first round compiles
        for bits, few_bits in quantized.items():
            weights.read_all()  # otherwise the processor's caches might still hold some codes
            samples[bits].append(_seconds(few_bits.read_all, device))
        samples["weights"].append(_seconds(weights.read_all, device))
        samples["model"].append(model.step_seconds())
        for key, layer in layers.items():
            weights.read_next()
            samples[key].append(_seconds(layer.step, device))
    seconds = {key: statistics.median(values) for key, values in samples.items()}
    caches = {
        name: CacheSpeed(
            tuple((layers[name, num_tokens].num_bytes, seconds[name, num_tokens]) for num_tokens in contexts),
            layers[name, contexts[0]].attention_flops(budget.chunk, budget.rounds),
        )
        for name in ("stock", *BITS)
    }
    speed = DeviceSpeed(
        weights.num_bytes / seconds["weights"],
        max(0.0, seconds["model"] / budget.layers - caches["stock"].step_seconds(0)),
        weights.flops(budget.chunk, budget.rounds),
        caches,
        {
            bits: WeightSpeed(few_bits.num_bytes / seconds[bits], few_bits.flops(budget.chunk, budget.rounds))
            for bits, few_bits in quantized.items()
        },
    )
    return speed, samples["weights"]


class _Weights:
    """Matrices of `num_bytes` in all, which are multiplied with one token or a chunk of a prompt, in turn."""

    def __init__(self, matrices: Sequence[torch.Tensor], num_bytes: int):
        self._matrices, self.num_bytes = matrices, num_bytes
        self._device, self._dtype = matrices[0].device, matrices[0].dtype
        self._turn = 0

    @classmethod
    def plain(cls, device: torch.device, dtype: torch.dtype, count: int) -> "_Weights":
        matrices = [torch.full(_MATRIX, 0.01, dtype=dtype, device=device) for _ in range(count)]
        return cls(matrices, sum(matrix.nbytes for matrix in matrices))

    def quantized(self, bits: int) -> "_Weights":
        """Return as many matrices, quantized."""
        matrix, count = self._matrices[0], len(self._matrices)
        parameter = torch.nn.Parameter(matrix, requires_grad=False)
        covered = Covered("matrices", parameter, [], is_transposed=False, is_head=False)
        stacked = covered.quantized(matrix.expand(count, *_MATRIX), Width.checked(bits))
        return _Weights([stacked.one(index) for index in range(count)], stacked.matrices.num_bytes)

    def read_next(self) -> None:
        self._turn = (self._turn + 1) % len(self._matrices)
        self._multiply(1)

    def read_all(self) -> None:
        for _ in self._matrices:
            self.read_next()

    def flops(self, chunk: int, rounds: int) -> float:
        """Floating-point operations per second of products with `chunk` tokens."""
        seconds = _median_seconds(lambda: self._multiply(chunk), self._device, rounds)
        return 2 * chunk * _MATRIX[0] * _MATRIX[1] / seconds

    def _multiply(self, num_tokens: int) -> None:
        tokens = torch.full((1, num_tokens, _MATRIX[1]), 0.1, dtype=self._dtype, device=self._device)
        linear(tokens, self._matrices[self._turn])


class _Layer:
    """A cache of one layer with random states; attention to it is called as a model calls it."""

    def __init__(self, name: str, states: torch.Tensor):
        self._device, self._dtype, self._num_tokens = states.device, states.dtype, states.shape[2]
        candidate = Candidate(name, Strategy.CPU if self._device == HOST else Strategy.GPU)
        config = _config(1)
        self._attention = LlamaAttention(config, 0)
        self._cache: Cache = (
            DynamicCache(config=config) if name == "stock" else Cache(layers=[_hybrid_layer(candidate)])
        )
        self._cache.update(states, states, 0)
        self.num_bytes = layer_bytes(KVShape.of(states, states), candidate.codec, self._num_tokens)

    def step(self) -> None:
        self._attend(1, None)

    def attention_flops(self, chunk: int, rounds: int) -> float:
        """Floating-point operations per second of the attention of a chunk to the tokens before it."""

        def attend() -> None:
            visible = torch.ones(chunk, self._num_tokens + chunk, dtype=torch.bool, device=self._device)
            self._attend(chunk, visible.tril(self._num_tokens)[None, None])

        flops = 4 * _HEADS * _HEAD_DIM * chunk * self._num_tokens
        return flops / _median_seconds(attend, self._device, rounds)

    def _attend(self, num_tokens: int, mask: torch.Tensor | None) -> None:
        states = self._states(_KV_HEADS, num_tokens)
        keys, values = self._cache.update(states, states, 0)
        self._num_tokens += num_tokens
        sdpa_attention_forward(self._attention, self._states(_HEADS, num_tokens), keys, values, mask)

    def _states(self, heads: int, num_tokens: int) -> torch.Tensor:
        return _random_states(heads, num_tokens, self._device, self._dtype)


class _Model:
    """A model of few weights. On a CPU a matrix is read before each layer, and that time is subtracted."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_layers: int, weights: _Weights):
        config = _config(num_layers)
        model: torch.nn.Module = LlamaForCausalLM(config)
        self._model = model.to(device, dtype).eval()
        self._cache = DynamicCache(config=config)
        self._device, self._weights = device, weights
        self._token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._excluded = 0.0
        # On a GPU the time of this model is that of launches, with which reading would overlap.
        for layer in self._model.get_submodule("model.layers").children() if device == HOST else []:
            layer.register_forward_pre_hook(self._read_matrix)

    def step_seconds(self) -> float:
        self._excluded = 0.0
        seconds = _seconds(lambda: self._model(self._token, **cache_argument(self._cache)), self._device)
        return seconds - self._excluded

    def _read_matrix(self, module: torch.nn.Module, inputs: tuple) -> None:
        self._excluded += _seconds(self._weights.read_next, self._device)


def _hybrid_layer(candidate: Candidate) -> HybridLayer:
    codecs = {} if candidate.codec is None else {0: candidate.codec}
    return HybridLayer(0, 0, LayerStores(candidate.placement, InitialCapacity(), 1, codecs))


def _random_states(heads: int, num_tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, heads, num_tokens, _HEAD_DIM, device=device).to(dtype)


def _config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
    )


@torch.inference_mode()
def _bus_speed(device: torch.device, rounds: int) -> tuple[float, float]:
    """Bytes per second from page-locked host memory to `device`, and seconds of a small tensor's round trip."""
    block = torch.empty(_BUS_BYTES, dtype=torch.uint8, pin_memory=can_page_lock(device.type))
    small = torch.zeros(_HEADS * _HEAD_DIM, device=device)
    copy = _median_seconds(lambda: block.to(device, non_blocking=True), device, rounds)
    return _BUS_BYTES / copy, _median_seconds(lambda: small.to(HOST).to(device), device, rounds)


def _median_seconds(action: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median seconds of `rounds` rounds, after one round that compiles."""
    return statistics.median([_seconds(action, device) for _ in range(rounds + 1)][1:])


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of `action`, until the device has finished what it started."""
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
