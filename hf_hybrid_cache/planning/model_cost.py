"""
The cost of a model without a cache: weights, shapes of keys and values, and the memory of a prefill.

Only a config is needed. The model is built on torch's meta device, where tensors have shapes and no data, and a few
chunks of a prompt run there. So the numbers come from the model's own code, whatever its family.
"""

import copy
import functools
import pickle
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..cache_argument import cache_argument
from ..errors import HybridCacheError
from ..layers import tensors_of, window_of
from ..storage import KVShape
from ..weights import WEIGHT_BITS, Width, coverage, holds_experts

META = torch.device("meta")
_MAX_CONTEXT = 2**20  # where a config has no limit


class CostError(HybridCacheError, ValueError):
    """The cost of a model cannot be computed; the message says why."""


@dataclass(frozen=True)
class QuantizedWeights:
    """
    The sizes of a model's weights after `quantize_weights` with its defaults.

    Attributes:
        num_bytes: of all weights, with those that are not quantized.
        largest_matrix_bytes: of the largest matrix before it is quantized; each expert has its own matrices.
    """

    num_bytes: int
    largest_matrix_bytes: int


@dataclass(frozen=True)
class ExpertsCost:
    """
    The cost of all experts of a model.

    Attributes:
        num_bytes: of their matrices by the bits of a weight; `None` for matrices as they are. Biases count with the
            model's other weights. Empty for a dense model.
        largest_bytes: of the largest expert, not quantized.
    """

    num_bytes: Mapping[int | None, int] = field(default_factory=dict)
    largest_bytes: int = 0

    def total_bytes(self, bits: int | None = None) -> int:
        """Bytes of all experts of all layers in so many bits; `None` for experts as they are."""
        return self.num_bytes.get(bits, 0)


@dataclass(frozen=True)
class OtherLayer:
    """
    The size of transformers' own layer, where it is not one of full attention.

    Attributes:
        shape: of its keys and values, on the meta device; `None` if it has none.
        most_tokens: the most tokens that it keeps; `None` for all.
        fixed_bytes: held at any context length.
        window: tokens that a query sees, if a `HybridCache` has a layer of its own for them.
    """

    shape: KVShape | None
    most_tokens: int | None
    fixed_bytes: int
    window: int | None

    @classmethod
    def of(cls, layer: Any) -> "OtherLayer":
        """The size of a layer, measured on one that holds some tokens."""
        held = sum(tensor.nbytes for tensor in tensors_of(layer))
        if not isinstance(layer, DynamicLayer) or layer.get_seq_length() == 0:
            return cls(None, None, held, None)
        states: tuple[Any, Any] = layer.keys, layer.values
        window = getattr(layer, "sliding_window", None)
        fixed_bytes = held - sum(tensor.nbytes for tensor in states)
        return cls(KVShape.of(*states), window and window - 1, fixed_bytes, window_of(layer))

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes held after `num_tokens` tokens."""
        if self.shape is None:
            return self.fixed_bytes
        kept = num_tokens if self.most_tokens is None else min(num_tokens, self.most_tokens)
        return self.fixed_bytes + kept * sum(self.shape.token_bytes)


@dataclass(frozen=True)
class ModelCost:
    """
    The cost of a model without a cache.

    Attributes:
        name: for messages and code.
        dtype: of weights, keys and values.
        weight_bytes: of all weights, experts included.
        held_bits: of a weight that another library holds quantized; its bytes are then about those of ours. `None` for
            weights of `dtype`.
        quantized_weights: sizes of the quantized weights, by bits; empty where no weight can be quantized.
        comes_quantized: whether its files are quantized by another library; they are dequantized while they are loaded.
        max_context: the most tokens that the model can attend to.
        batch: number of sequences.
        chunk: number of tokens of each sequence in one forward pass of the prefill.
        experts: cost of the experts.
        shapes: of the keys and values of the full-attention layers, by index, on the meta device.
        others: the other layers, by index.
        has_kernel: whether the CPU kernel computes its attention.
        least_working_bytes: working memory of a chunk, besides weights and cache, with nothing before it.
        working_bytes_line: constant and slope of a chunk's working memory in the context length, for long contexts.
    """

    name: str
    dtype: torch.dtype
    weight_bytes: int
    held_bits: int | None
    quantized_weights: Mapping[int, QuantizedWeights]
    comes_quantized: bool
    max_context: int
    batch: int
    chunk: int
    experts: ExpertsCost
    shapes: Mapping[int, KVShape]
    others: Mapping[int, OtherLayer]
    has_kernel: bool
    least_working_bytes: int
    working_bytes_line: tuple[float, float]

    def without_experts(self) -> "ModelCost":
        """The cost of the model without its experts; `quantized_weights` still includes them."""
        return replace(
            self,
            weight_bytes=self.weight_bytes - self.experts.total_bytes(),
            experts=ExpertsCost(),
        )

    def lengths(self, context: int) -> list[int]:
        """The number of cached tokens after each chunk of a prompt of `context` tokens."""
        return [*range(self.chunk, context, self.chunk), context]

    def working_bytes(self, context: int) -> int:
        """The most working memory of a chunk, besides weights and cache, in a prompt of `context` tokens."""
        constant, slope = self.working_bytes_line
        return max(self.least_working_bytes, int(constant + slope * context))

    @property
    def has_windows(self) -> bool:
        """Whether a `HybridCache` has layers of its own for windows."""
        return any(layer.window is not None for layer in self.others.values())

    def held_by_others(self, context: int) -> int:
        """Bytes held by the other layers in transformers' own cache."""
        return sum(layer.held_bytes(context) for layer in self.others.values())


def model_cost(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, batch: int = 1, chunk: int = 512
) -> ModelCost:
    """
    Compute the cost of a model. It takes about a second, and a few for hundreds of billions of weights.

    The last costs are kept, so the next call for an equal config takes next to no time.

    Args:
        config: of a causal language model.
        dtype: of its weights, keys and values; `None` for the config's, or bfloat16 if it has none.
        batch: number of sequences.
        chunk: number of tokens in one forward pass of the prefill, the `prefill_chunk_size` of `generate`.

    Raises:
        CostError: transformers cannot run such a model without data.
    """
    dtype = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16)
    return _cost_of_pickled(pickle.dumps(config), dtype, batch, chunk)


@functools.lru_cache(maxsize=32)
def _cost_of_pickled(pickled_config: bytes, dtype: torch.dtype, batch: int, chunk: int) -> ModelCost:
    """The cost of the model of a config, which is pickled because configs have no hash and compare in part only."""
    config: PreTrainedConfig = pickle.loads(pickled_config)
    name = config.name_or_path or type(config).__name__
    try:
        max_context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _MAX_CONTEXT
        if not isinstance(max_context, int) or max_context < 1:
            raise ValueError(f"max_position_embeddings is {max_context!r}")
        model = model_on_meta(config, dtype)
        cache: Any = DynamicCache(config=config)
        # The working memory of a chunk grows with the tokens before it; the second and third chunk give the slope.
        longest = max(max_context, 8 * chunk)
        first, middle, last = (_run_chunk(model, cache, batch, chunk, end) for end in (chunk, longest // 4, longest))
        quantized, experts = _cost_of_weights(model)
    except Exception as error:  # any exception: this runs the code of any model
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CostError(f"What {name} costs cannot be worked out without its weights: {reason}") from error
    slope = (last.peak_bytes - middle.peak_bytes) / (longest - longest // 4)
    # `HybridCache` chooses the layers that it replaces by the same type.
    ours = [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer and layer.is_initialized]
    shapes = {index: KVShape.of(cache.layers[index].keys, cache.layers[index].values) for index in ours}
    weight_bytes, held_bits = sum(weight.nbytes for weight in model.parameters()), _held_bits(config)
    if held_bits in quantized:  # nobody can quantize them again, nor move their experts
        weight_bytes, quantized, experts = quantized[held_bits].num_bytes, {}, ExpertsCost()
    else:
        held_bits = None
    return ModelCost(
        name=name,
        dtype=dtype,
        weight_bytes=weight_bytes,
        held_bits=held_bits,
        quantized_weights=quantized,
        comes_quantized=getattr(config, "quantization_config", None) is not None,
        max_context=max_context,
        batch=batch,
        chunk=chunk,
        experts=experts,
        shapes=shapes,
        others={index: OtherLayer.of(layer) for index, layer in enumerate(cache.layers) if index not in shapes},
        has_kernel=last.attended_dims == {(shape.key_dim, shape.value_dim) for shape in shapes.values()},
        least_working_bytes=first.peak_bytes,
        working_bytes_line=(last.peak_bytes - slope * longest, slope),
    )


def _held_bits(config: PreTrainedConfig) -> Any:
    """The bits of a weight that a config names as GPTQ, AWQ and bitsandbytes do, which keep them; `None` for others."""
    given: Any = getattr(config, "quantization_config", None) or {}
    named = given if isinstance(given, Mapping) else given.to_dict()
    switched_on = (bits for bits in WEIGHT_BITS if named.get(f"load_in_{bits}bit"))
    return next(switched_on, named.get("bits", named.get("w_bit")))


def model_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model of a copy of a config, without data."""
    with torch.device(META):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def _cost_of_weights(model: PreTrainedModel) -> tuple[dict[int, QuantizedWeights], ExpertsCost]:
    """The sizes of the weights by bits, empty if none can be quantized, and the cost of the experts."""
    covered = {id(each.parameter): each for each in coverage(model)[0]}

    def size(weights: Iterable[nn.Parameter], bits: int | None) -> int:
        """Bytes of weights; those that are too small to be quantized count as they are."""
        width = None if bits is None else Width.checked(bits)
        sizes = (
            covered[id(weight)].quantized_bytes(width) if width and id(weight) in covered else weight.nbytes
            for weight in weights
        )
        return sum(sizes)

    largest = max((each.matrix_bytes for each in covered.values()), default=0)
    quantized = {bits: QuantizedWeights(size(model.parameters(), bits), largest) for bits in WEIGHT_BITS if covered}
    # The stacked matrices of the experts, by module.
    stacked = {
        module: [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
        for module in model.modules()
    }
    of_layers = [matrices for module, matrices in stacked.items() if matrices and holds_experts(module)]
    if not of_layers:
        return quantized, ExpertsCost()
    num_bytes = {bits: sum(size(matrices, bits) for matrices in of_layers) for bits in (None, *WEIGHT_BITS)}
    return quantized, ExpertsCost(num_bytes, max(size(matrices, None) // len(matrices[0]) for matrices in of_layers))


@dataclass(frozen=True)
class _Chunk:
    """Working memory of a chunk, and head sizes of its attention to all tokens that `sdpa` computes."""

    peak_bytes: int
    attended_dims: set[tuple[int, int]]


@torch.no_grad()
def _run_chunk(model: Any, cache: Any, batch: int, chunk: int, end: int) -> _Chunk:
    """Run the chunk that grows the cache to `end` tokens; missing tokens before it are filled in without data."""
    missing = end - chunk - cache.get_seq_length()
    grown: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    for layer in grown if missing else []:
        batch, heads = layer.keys.shape[:2]
        keys, values = (
            states.new_empty(batch, heads, missing, states.shape[3]) for states in (layer.keys, layer.values)
        )
        layer.update(keys, values)
    held = (tensor for layer in cache.layers for tensor in tensors_of(layer))
    options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    ids = torch.zeros(batch, chunk, dtype=torch.long, device=META)
    with _FusedOperations(end) as fused, _LiveBytes([*model.parameters(), *model.buffers()], held) as live:
        model(ids, **cache_argument(cache), **options)
    return _Chunk(live.peak_bytes, fused.dims)


# Versions of torch differ in which of them exist.
_GROUPED_PRODUCTS = [
    product
    for owner, name in [(nn.functional, "grouped_mm"), (torch, "_grouped_mm")]
    if (product := getattr(owner, name, None))
]


class _FusedOperations(TorchFunctionMode):
    """
    Keeps attention one operation, which the meta device would decompose, and computes grouped products of any dtype,
    for which the meta device demands bfloat16.

    Args:
        num_tokens: number of cached tokens after the chunk.

    Attributes:
        dims: head sizes of keys and values in attention to all `num_tokens` tokens.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self.dims: set[tuple[int, int]] = set()
        self._num_tokens = num_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GROUPED_PRODUCTS:
            tokens, matrices = args[:2]
            return tokens.new_empty(*tokens.shape[:-1], matrices.shape[-1])
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, keys, values = args[:3]
        if keys.shape[2] == self._num_tokens:
            self.dims.add((keys.shape[3], values.shape[3]))
        return query.new_empty(*query.shape[:-1], values.shape[3])


class _LiveBytes(TorchDispatchMode):
    """
    Counts the bytes of live tensors.

    Args:
        others: tensors that are never counted.
        held: tensors that exist from the beginning; their bytes are subtracted.

    Attributes:
        peak_bytes: the most bytes of live tensors at a time.
    """

    def __init__(self, others: Iterable[torch.Tensor], held: Iterable[torch.Tensor]):
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in others}
        for tensor in held:
            self._count(tensor)
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._bytes += num_bytes
            weakref.finalize(storage, self._forget, key, num_bytes).atexit = False

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._bytes -= num_bytes
