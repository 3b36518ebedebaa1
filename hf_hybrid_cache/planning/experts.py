"""
The cost of a mixture-of-experts model's experts: their bytes, and how many of them a number of tokens choose.

The expected number of chosen experts is that of a router that chooses each expert equally often, independently for each
token. Real routers prefer some experts, and neighbouring tokens choose alike, so fewer experts are read. The number for
a single token is exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..weights import WEIGHT_BITS, Width, coverage, holds_experts


@dataclass(frozen=True)
class LayerExperts:
    """
    The experts of one layer.

    Attributes:
        count: number of experts.
        chosen: number of experts that each token chooses.
        num_weights: number of weights in the matrices of all experts; biases count with the model's other weights.
        num_bytes: of these matrices, not quantized.
        quantized_bytes: of these matrices, quantized, by bits; matrices that are too small for it are counted as they
            are.
        state_bytes: of one token's hidden states, which go to an expert; as many come back.
    """

    count: int
    chosen: int
    num_weights: int
    num_bytes: int
    quantized_bytes: dict[int, int]
    state_bytes: int

    def distinct(self, num_tokens: int) -> float:
        """
        The expected number of experts that at least one of `num_tokens` tokens chooses.

        A token does not choose a given expert with probability `1 - chosen / count`.
        """
        return self.count * (1.0 - (1.0 - self.chosen / self.count) ** num_tokens)

    def bytes_in(self, bits: int | None) -> int:
        """Bytes of all experts in so many bits; `None` for experts as they are."""
        return self.num_bytes if bits is None else self.quantized_bytes[bits]


@dataclass(frozen=True)
class ExpertsCost:
    """
    The cost of all experts of a model.

    Attributes:
        layers: the layers with experts; empty for a dense model.
    """

    layers: tuple[LayerExperts, ...] = ()

    def total_bytes(self, bits: int | None = None) -> int:
        """Bytes of all experts of all layers in so many bits; `None` for experts as they are."""
        return sum(layer.bytes_in(bits) for layer in self.layers)

    def read_bytes(self, num_tokens: int, bits: int | None = None) -> float:
        """The expected bytes of all experts that `num_tokens` tokens choose in one step; each expert is read once."""
        return sum(layer.distinct(num_tokens) / layer.count * layer.bytes_in(bits) for layer in self.layers)

    def distinct(self, num_tokens: int) -> float:
        """The expected number of experts of a layer that `num_tokens` tokens choose in one step."""
        return sum(layer.distinct(num_tokens) for layer in self.layers) / max(1, len(self.layers))

    @property
    def token_flops(self) -> float:
        """Floating-point operations of one token with its chosen experts."""
        return sum(2 * layer.chosen / layer.count * layer.num_weights for layer in self.layers)

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross the bus for one token, to experts in host memory and back, in all layers."""
        return sum(2 * layer.state_bytes for layer in self.layers)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest expert, not quantized."""
        return max((layer.num_bytes // layer.count for layer in self.layers), default=0)


class ExpertModules:
    """The modules of a model that hold experts; they are observed to learn how many experts a token chooses."""

    def __init__(self, model: PreTrainedModel):
        self._matrices: dict[nn.Module, list[nn.Parameter]] = {}
        for module in model.modules():
            stacked = [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
            if stacked and holds_experts(module):
                self._matrices[module] = stacked
        self._seen: dict[nn.Module, tuple[int, int]] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the inputs of the modules inside the block: configs have no common name for these numbers."""
        hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in self._matrices]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def costs(self, model: PreTrainedModel) -> dict[int, LayerExperts]:
        """The cost of each layer's experts, by the `id` of each of their matrices."""
        covered = {id(each.parameter): each for each in coverage(model)[0]} if self._matrices else {}
        costs: dict[int, LayerExperts] = {}
        for module, matrices in self._matrices.items():
            count = len(matrices[0])
            # A module without observed inputs counts as if all its experts were read.
            chosen, state_bytes = self._seen.get(module, (count, 0))
            quantized = {
                bits: sum(
                    covered[id(matrix)].quantized_bytes(Width.checked(bits)) if id(matrix) in covered else matrix.nbytes
                    for matrix in matrices
                )
                for bits in WEIGHT_BITS
            }
            numbers = sum(matrix.numel() for matrix in matrices), sum(matrix.nbytes for matrix in matrices)
            layer = LayerExperts(count, min(chosen, count), *numbers, quantized, state_bytes)
            costs |= {id(matrix): layer for matrix in matrices}
        return costs

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        states, choices = tensors[0], next((each for each in tensors if not each.is_floating_point()), None)
        if choices is not None:
            self._seen[module] = choices.shape[-1], states.shape[-1] * states.itemsize
