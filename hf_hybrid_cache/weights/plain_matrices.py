"""Weights in full precision in host memory, and the products of tokens with them."""

from functools import partial

import torch
from torch.nn import functional

from ..kernels import RowWeights, multiply_rows
from .matrices import Matrices

_OF_KERNEL = (torch.float32, torch.bfloat16)


class PlainMatrices(Matrices):
    """
    Several weights of one shape, such as a layer's experts, as they are.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating type; not copied.
    """

    # With more, products are bound by arithmetic, and torch's are faster.
    most_tokens = 4

    def __init__(self, weights: torch.Tensor):
        super().__init__(*weights.shape)
        self._weights = weights

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(tokens, self._weights[index], bias)

    def multiply_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights = self._weights
        assert tokens.dtype == weights.dtype
        if weights.dtype not in _OF_KERNEL or not weights.is_contiguous():
            return self._multiply_one_by_one(tokens, chosen, bias)
        of = RowWeights(weights.data_ptr(), *weights.shape)
        return self._chosen_by(partial(multiply_rows, of), tokens, chosen, bias)

    def write(self, index: int, out: torch.Tensor) -> None:
        out.copy_(self._weights[index])

    def _multiply_one_by_one(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """For types and orders that the kernel does not read, such as matrices whose columns come before their rows."""
        pairs_of_token = chosen.numel() // len(tokens)
        out = tokens.new_zeros((chosen.numel(), *self.out_sizes))
        flat = chosen.flatten()
        for index in flat.unique().tolist():
            if index == self.count:
                continue
            pairs = (flat == index).nonzero()[:, 0]
            inputs = tokens[pairs // pairs_of_token]
            out[pairs] = self.multiply(inputs, index, None if bias is None else bias[index])
        return out
