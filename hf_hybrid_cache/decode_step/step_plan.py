"""A model's step in one call: its weights and memory, and the layers of the cache that it is run with."""

from typing import Any

import torch
from torch import nn

from ..cache import HybridCache, WholeSteps
from ..kernels import LayerWeights, Products, Projection, Shape, States, StepMemory
from ..storage import KVShape
from ..weights import QuantizedWeight
from .known_models import KnownLayer, KnownModel


class StepPlan:
    """
    The step of a model for a number of sequences.

    Args:
        known: the model, whose weights stay where they are.
        rows: sequences.
    """

    def __init__(self, known: KnownModel, rows: int):
        self.rows = rows
        norm: Any = known.norm.weight
        self.dtype: torch.dtype = norm.dtype
        heads = known.num_kv_heads, known.num_heads // known.num_kv_heads
        shape, dim = Shape(rows, *heads, 1, known.head_dim, known.head_dim), known.head_dim
        self._kv_shape = KVShape(rows, known.num_kv_heads, dim, dim, self.dtype, self.dtype, norm.device)
        with torch.inference_mode(False):
            self._states, self._out = (torch.empty(rows, 1, norm.numel(), dtype=self.dtype) for _ in range(2))
            self._cosines, self._sines = (torch.empty(rows, 1, known.head_dim, dtype=self.dtype) for _ in range(2))
            self._angles = self._cosines.shape, (1, *self._cosines.shape[1:])
            of_layer = rows, known.num_heads, 1, known.head_dim
            self._queries = torch.empty(len(known.layers), *of_layer, dtype=self.dtype)
        tensors = self._states, self._queries, self._out, self._cosines, self._sines
        self._memory = StepMemory(
            [_weights_of(layer) for layer in known.layers], _address(known.norm), known.epsilon, shape,
            known.scale, self.dtype == torch.bfloat16, States(*(each.data_ptr() for each in tensors)),
        )  # fmt: skip
        self._indices = [layer.index for layer in known.layers]
        self._steps: WholeSteps | None = None

    def take(self, cache: HybridCache) -> str:
        """
        Prepare a step over a cache; return why it is not possible, or an empty string.

        Raises:
            IncompleteCacheError: something has ended a change of the cache half-way.
        """
        steps = self._steps
        if steps is None or not steps.are_of(cache):
            self._steps = None
            steps = WholeSteps(cache, self._indices)
            if steps.why_none:
                return steps.why_none
            stores = steps.stores
            if any(store.shape != self._kv_shape for store in stores):
                return f"the cache holds {stores[0].shape}, the step is of {self._kv_shape}"
            steps.count_next()
            self._memory.take(steps.blocks)
            self._steps = steps
        return ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache that was taken."""
        assert self._steps is not None
        return self._steps.num_tokens

    def unfit(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> str:
        """Return why `run` cannot take these, or an empty string."""
        if (states.dtype, states.shape, states.device) != (self.dtype, self._states.shape, self._states.device):
            return f"hidden states are {tuple(states.shape)} of {states.dtype} on {states.device}"
        if any(each.shape not in self._angles for each in (cosines, sines)):
            return f"angles of positions are {tuple(cosines.shape)}"
        return ""

    def run(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """
        Run the step over the cache that was taken.

        Args:
            states: of the tokens, `[rows, 1, columns]`.
            cosines: of their positions, `[rows or 1, 1, head_dim]`.
            sines: likewise.

        Returns:
            What the last norm gives, like `states`.
        """
        steps = self._steps
        assert steps is not None
        self._steps = None  # until it is whole
        steps.begin()
        self._states.copy_(states)
        self._cosines.copy_(cosines)
        self._sines.copy_(sines)
        self._memory.run()
        steps.end(self._queries)
        self._steps = steps
        return self._out.clone()


def _weights_of(layer: KnownLayer) -> LayerWeights:
    return LayerWeights(
        _address(layer.input_norm),
        _address(layer.post_norm),
        _address(layer.q_norm),
        _address(layer.k_norm),
        layer.is_rotated,
        [*map(_projection, layer.projections.values())],
    )


def _projection(module: nn.Linear) -> Projection:
    weight: Any = module.weight
    bias = 0 if module.bias is None else module.bias.data_ptr()
    if isinstance(weight, QuantizedWeight):
        assert weight.which is not None
        return Projection(weight.matrices.products, weight.which, bias)
    rows, columns = weight.shape
    of_plain = Products.of_numbers(weight.data_ptr(), 1, rows, columns, weight.dtype == torch.bfloat16)
    return Projection(of_plain, 0, bias)


def _address(norm: nn.Module | None) -> int:
    weight: Any = None if norm is None else norm.weight
    return 0 if weight is None else weight.data_ptr()
