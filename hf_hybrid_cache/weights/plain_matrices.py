"""Matrices in full precision in host memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from ..kernels import (
    ExpertCall,
    PlainWeights,
    add_up_plain_experts,
    compile_plain_weights_in_background,
    multiply_plain,
)
from .matrices import Matrices

_OF_KERNEL = (torch.float32, torch.bfloat16)


class PlainMatrices(Matrices):
    """
    Several matrices of one shape, such as a layer's experts, in full precision.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating-point dtype; not copied.
    """

    # With more tokens, arithmetic limits the products, and torch is faster.
    most_tokens = 4

    def __init__(self, weights: torch.Tensor):
        super().__init__(*weights.shape)
        self._weights = weights
        if weights.dtype in _OF_KERNEL:
            compile_plain_weights_in_background()

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(tokens, self._weights[index], bias)

    def multiply_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert tokens.dtype == self._weights.dtype
        weights = self._of_kernel()
        if weights is None:
            return self._multiply_one_by_one(tokens, chosen, bias)
        return self._chosen_by(partial(multiply_plain, weights), tokens, chosen, bias)

    def _kernel_of_experts(self, down: Matrices, dtype: torch.dtype) -> Callable[[ExpertCall], int] | None:
        if not isinstance(down, PlainMatrices):
            return None
        assert dtype == self._weights.dtype == down._weights.dtype
        up_weights, down_weights = self._of_kernel(), down._of_kernel()
        if up_weights is None or down_weights is None or up_weights.is_transposed != down_weights.is_transposed:
            return None
        return partial(add_up_plain_experts, up_weights, down_weights)

    def write(self, index: int, out: torch.Tensor) -> None:
        out.copy_(self._weights[index])

    def _of_kernel(self) -> PlainWeights | None:
        """The matrices as the kernel reads them; `None` for dtypes and memory layouts that it does not read."""
        weights = self._weights
        is_transposed = not weights.is_contiguous()
        if weights.dtype not in _OF_KERNEL or not (weights.mT if is_transposed else weights).is_contiguous():
            return None
        count, rows, columns = weights.shape
        return PlainWeights(weights.data_ptr(), count, rows, columns, is_transposed)

    def _multiply_one_by_one(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute `multiply_chosen` by torch, for dtypes and memory layouts that the kernel does not read."""
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
