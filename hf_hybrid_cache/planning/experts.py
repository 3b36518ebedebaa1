"""
The experts of a mixture-of-experts model: what they take, and how many of them some tokens choose.

Which experts tokens choose is not known before they are there. Expected numbers are those of a router that chooses each
expert equally often, and for each token anew. Real ones have favourites, and tokens beside each other choose alike, so
that fewer experts are read; a single token always chooses as many as it does.
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
        count: how many there are.
        chosen: by each token.
        num_weights: in the matrices of all of them; biases count with the other weights of the model.
        num_bytes: of these matrices as they are.
        coded_bytes: of these matrices in few bits, by bits; those that are too small for that as they are.
        state_bytes: of one token, that go in; as many come out.
    """

    count: int
    chosen: int
    num_weights: int
    num_bytes: int
    coded_bytes: dict[int, int]
    state_bytes: int

    def distinct(self, num_tokens: int) -> float:
        """
        Experts that at least one of `num_tokens` tokens chooses, on average.

        A token leaves out a given expert with probability `1 - chosen / count`, if it chooses each equally often.
        """
        return self.count * (1.0 - (1.0 - self.chosen / self.count) ** num_tokens)

    def bytes_in(self, bits: int | None) -> int:
        """Bytes of all of them in so many bits; `None` is as they are."""
        return self.num_bytes if bits is None else self.coded_bytes[bits]


@dataclass(frozen=True)
class ExpertsCost:
    """
    What all experts of a model cost; a model without experts has no layers of them.

    Attributes:
        layers: that have experts.
    """

    layers: tuple[LayerExperts, ...] = ()

    def total_bytes(self, bits: int | None = None) -> int:
        """Bytes of all experts in so many bits; `None` is as they are."""
        return sum(layer.bytes_in(bits) for layer in self.layers)

    def read_bytes(self, num_tokens: int, bits: int | None = None) -> float:
        """Bytes of the experts that `num_tokens` tokens at once choose, on average, each read once."""
        return sum(layer.distinct(num_tokens) / layer.count * layer.bytes_in(bits) for layer in self.layers)

    def distinct(self, num_tokens: int) -> float:
        """Experts of a layer that `num_tokens` tokens at once choose, on average."""
        return sum(layer.distinct(num_tokens) for layer in self.layers) / max(1, len(self.layers))

    @property
    def token_flops(self) -> float:
        """Arithmetic of one token with the experts that it chooses."""
        return sum(2 * layer.chosen / layer.count * layer.num_weights for layer in self.layers)

    @property
    def crossing_bytes(self) -> int:
        """Bytes of one token's states on their way to experts elsewhere and back, in all layers."""
        return sum(2 * layer.state_bytes for layer in self.layers)

    @property
    def largest_bytes(self) -> int:
        """Bytes of one expert as it is, at most."""
        return max((layer.num_bytes // layer.count for layer in self.layers), default=0)


class ExpertModules:
    """The modules of a model that hold experts, and what goes into them."""

    def __init__(self, model: PreTrainedModel):
        self._matrices: dict[nn.Module, list[nn.Parameter]] = {}
        for module in model.modules():
            stacked = [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]
            if stacked and holds_experts(module):
                self._matrices[module] = stacked
        self._seen: dict[nn.Module, tuple[int, int]] = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Note what goes into the modules meanwhile: families differ in what their configs call it."""
        hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in self._matrices]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def costs(self, model: PreTrainedModel) -> dict[int, LayerExperts]:
        """What the experts of a layer cost, by the `id` of each of its matrices."""
        covered = {id(each.parameter): each for each in coverage(model)[0]} if self._matrices else {}
        costs: dict[int, LayerExperts] = {}
        for module, matrices in self._matrices.items():
            count = len(matrices[0])
            # A module that nothing went into: all are read.
            chosen, state_bytes = self._seen.get(module, (count, 0))
            coded = {
                bits: sum(
                    covered[id(matrix)].coded_bytes(Width.checked(bits)) if id(matrix) in covered else matrix.nbytes
                    for matrix in matrices
                )
                for bits in WEIGHT_BITS
            }
            numbers = sum(matrix.numel() for matrix in matrices), sum(matrix.nbytes for matrix in matrices)
            layer = LayerExperts(count, min(chosen, count), *numbers, coded, state_bytes)
            costs |= {id(matrix): layer for matrix in matrices}
        return costs

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        states, choices = tensors[0], next((each for each in tensors if not each.is_floating_point()), None)
        if choices is not None:
            self._seen[module] = choices.shape[-1], states.shape[-1] * states.itemsize
