"""
The cost of a mixture-of-experts model's experts: their bytes, and how many of them a number of tokens choose.

The expected number of chosen experts is that of a router that chooses each expert equally often, independently for each
token. Real routers prefer some experts, so fewer are read. The number for a single token is exact.
"""

from collections.abc import Iterator, Mapping
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
        num_bytes: of the matrices of all experts by the bits of a weight; `None` for matrices as they are. Biases
            count with the model's other weights.
    """

    count: int
    chosen: int
    num_bytes: Mapping[int | None, int]

    def share_read(self, num_tokens: int) -> float:
        """The expected share of the experts that at least one of `num_tokens` tokens chooses."""
        return 1.0 - (1.0 - self.chosen / self.count) ** num_tokens


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
        return sum(layer.num_bytes[bits] for layer in self.layers)

    def read_bytes(self, num_tokens: int, bits: int | None = None) -> float:
        """The expected bytes of all experts that `num_tokens` tokens choose in one step; each expert is read once."""
        return sum(layer.share_read(num_tokens) * layer.num_bytes[bits] for layer in self.layers)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest expert, not quantized."""
        return max((layer.num_bytes[None] // layer.count for layer in self.layers), default=0)


@contextmanager
def observed_choices(model: PreTrainedModel) -> Iterator[dict[nn.Module, int]]:
    """
    Observe how many experts a token chooses, while the model runs in the block: configs have no common name for it.

    Yields:
        The number for each module that holds experts; 0 for a module whose input has no choices.
    """
    chosen: dict[nn.Module, int] = {module: 0 for module in model.modules() if _matrices(module)}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                chosen[module] = value.shape[-1]
                return

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in chosen]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def experts_of_layers(model: PreTrainedModel, chosen: Mapping[nn.Module, int]) -> ExpertsCost:
    """The cost of each layer's experts; `chosen` was observed."""
    covered = {id(each.parameter): each for each in coverage(model)[0]} if chosen else {}
    found = []
    for module, number in chosen.items():
        matrices = _matrices(module)
        num_bytes: dict[int | None, int] = {None: sum(matrix.nbytes for matrix in matrices)}
        for bits in WEIGHT_BITS:
            # Matrices that are too small to be quantized count as they are.
            num_bytes[bits] = sum(
                covered[id(matrix)].quantized_bytes(Width.checked(bits)) if id(matrix) in covered else matrix.nbytes
                for matrix in matrices
            )
        count = len(matrices[0])
        found.append(LayerExperts(count, min(number or count, count), num_bytes))
    return ExpertsCost(tuple(found))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """The stacked matrices of the experts that a module holds."""
    stacked = [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
    return stacked if stacked and holds_experts(module) else []
