"""The caches that `experiments.quality.quality` compares."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

from experiments.common.decoding import prefill
from hf_hybrid_cache import HybridCache, minmax

REFERENCE = "full"
PEERS = ("optimum-quanto", "hqq", "tiny-turboquant")
STEP_TOKENS = 16


class Fp8Layer(DynamicLayer):
    """
    A layer that stores 8-bit floats, float8_e4m3fn without a scale; what is beyond their range becomes its end.

    As in transformers' own quantized layers, new states are attended to as they came, and those before as stored.
    """

    stored_dtype = torch.float8_e4m3fn

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (states[..., :0, :].to(self.stored_dtype) for states in (key_states, value_states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        keys, self.keys = self._append(self.keys, key_states)
        values, self.values = self._append(self.values, value_states)
        return keys, values

    def _append(self, stored: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states to attend to, and the states to store from now on."""
        limit = torch.finfo(self.stored_dtype).max
        quantized = states.clamp(-limit, limit).to(self.stored_dtype)
        return torch.cat([stored.to(states.dtype), states], dim=-2), torch.cat([stored, quantized], dim=-2)


def fp8_cache(config: PreTrainedConfig) -> Cache:
    return Cache(layers=[Fp8Layer() for _ in DynamicCache(config=config).layers])


def our_cache(config: PreTrainedConfig, bits: int | tuple[int, int], rotate: Any = "auto") -> Cache:
    return HybridCache(config, codec=minmax(bits, rotate=rotate))


def stock_cache(config: PreTrainedConfig, backend: str, bits: int | None = None) -> Cache:
    """
    Make transformers' quantized cache by default: groups of 64, each with a scale and a zero in the model's dtype.

    After 128 more tokens all that is stored is decoded and quantized anew. Quanto gets the same codes again; hqq forms
    other groups and so loses more each time.
    """
    return QuantizedCache(backend, config, nbits=bits)


def tiny_turboquant_cache(config: PreTrainedConfig, key_bits: int, value_bits: int) -> Cache:
    return import_module("tiny_turboquant").TinyKVCache(key_bits=key_bits, value_bits=value_bits)


CACHES: dict[str, Callable[[PreTrainedConfig], Cache]] = {
    REFERENCE: lambda config: DynamicCache(config=config),
    "ours-8": partial(our_cache, bits=8),
    "ours-4": partial(our_cache, bits=4),
    "ours-4-2": partial(our_cache, bits=(4, 2)),
    "ours-2": partial(our_cache, bits=2),
    **{
        f"ours-{bits}-{name}": partial(our_cache, bits=bits, rotate=rotate)
        for bits in (8, 4, 2)
        for name, rotate in (("rotated", True), ("plain", False))
    },
    "quanto-4": partial(stock_cache, backend="quanto", bits=4),
    "quanto-2": partial(stock_cache, backend="quanto", bits=2),
    "hqq-4": partial(stock_cache, backend="hqq", bits=4),
    "hqq-2": partial(stock_cache, backend="hqq", bits=2),
    "fp8": fp8_cache,
    "tiny-turboquant-4-4": partial(tiny_turboquant_cache, key_bits=4, value_bits=4),
    "tiny-turboquant-3-2": partial(tiny_turboquant_cache, key_bits=3, value_bits=2),
}


def peer_versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that are compared with."""
    return {package: installed_version(package) for package in PEERS}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def reasons_to_skip(model: PreTrainedModel, ids: torch.Tensor, names: Iterable[str]) -> dict[str, str]:
    """
    Return the reasons why some caches do not work here, by name.

    Each stores a few tokens and is attended to, because some packages compile when they are first used.

    Args:
        model: that the caches are for.
        ids: [1, tokens], at least 80.
        names: keys of `CACHES`.
    """
    reasons = {}
    for name in names:
        try:
            cache = CACHES[name](model.config)
            for piece in (ids[:, :64], ids[:, 64 : 64 + STEP_TOKENS]):
                prefill(model, cache, piece)
        except Exception as error:  # any error: this is code of others, and one cache less is no reason to stop
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


@torch.inference_mode()
def filled(cache: Cache, prefilled: Cache, dtype: torch.dtype | None = None) -> Cache:
    """
    An empty cache, now with the keys and values of one in full precision.

    All in one update, as a prefill in one forward pass brings them. The prefill itself attended to them as they came,
    which is what it does with every cache compared.

    Args:
        cache: empty; returned.
        prefilled: a `DynamicCache`.
        dtype: to convert them to (default: as they are).
    """
    for index, (keys, values) in enumerate(states_of(prefilled)):
        cache.update(keys.to(dtype or keys.dtype), values.to(dtype or values.dtype), index)
    return cache


def stored_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps: quantized states, scales, zero points, and states that are not quantized yet."""
    if isinstance(cache, HybridCache):
        report = cache.memory()
        return report.device_bytes + report.host_bytes
    storages = [tensor.untyped_storage() for layer in cache.layers for tensor in _tensors_in(vars(layer))]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bfloat16_bytes(reference: Cache) -> int:
    """Return the bytes of the tokens of a full-precision cache in bfloat16."""
    return sum(torch.bfloat16.itemsize * (keys.numel() + values.numel()) for keys, values in states_of(reference))


def states_of(cache: Cache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer of a full-precision cache."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys, layer.values


def _tensors_in(held: Any) -> Iterator[torch.Tensor]:
    """Tensors in dicts, tuples and lists; of a tensor that is made of others, such as quanto's, those others."""
    if hasattr(held, "__tensor_flatten__"):
        yield from _tensors_in([getattr(held, name) for name in held.__tensor_flatten__()[0]])
    elif isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping):
        yield from _tensors_in(list(held.values()))
    elif isinstance(held, list | tuple):
        for part in held:
            yield from _tensors_in(part)
