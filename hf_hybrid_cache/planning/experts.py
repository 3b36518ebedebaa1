"""The cost of a mixture-of-experts model's experts: their bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..weights import WEIGHT_BITS, Width, coverage, holds_experts


@dataclass(frozen=True)
class LayerExperts:
    """
    The experts of one layer.

    Attributes:
        count: number of experts.
        num_bytes: of the matrices of all experts by the bits of a weight; `None` for matrices as they are. Biases
            count with the model's other weights.
    """

    count: int
    num_bytes: Mapping[int | None, int]


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

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest expert, not quantized."""
        return max((layer.num_bytes[None] // layer.count for layer in self.layers), default=0)


def experts_of_layers(model: PreTrainedModel) -> ExpertsCost:
    """The cost of each layer's experts."""
    of_layers = [matrices for module in model.modules() if (matrices := _matrices(module))]
    covered = {id(each.parameter): each for each in coverage(model)[0]} if of_layers else {}
    found = []
    for matrices in of_layers:
        num_bytes: dict[int | None, int] = {None: sum(matrix.nbytes for matrix in matrices)}
        for bits in WEIGHT_BITS:
            # Matrices that are too small to be quantized count as they are.
            num_bytes[bits] = sum(
                covered[id(matrix)].quantized_bytes(Width.checked(bits)) if id(matrix) in covered else matrix.nbytes
                for matrix in matrices
            )
        found.append(LayerExperts(len(matrices[0]), num_bytes))
    return ExpertsCost(tuple(found))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """The stacked matrices of the experts that a module holds."""
    stacked = [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
    return stacked if stacked and holds_experts(module) else []
