"""Matrices in full precision in host memory."""

import torch
from torch.nn import functional

from ..kernels import Products, compile_plain_weights_in_background
from .matrices import OF_KERNEL, Matrices


class PlainMatrices(Matrices):
    """
    Several matrices of one shape, such as a layer's experts, in full precision.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating-point dtype; not copied.
    """

    # With more tokens, arithmetic limits the products, and torch is faster.
    most_tokens = 4

    def __init__(self, weights: torch.Tensor):
        count, rows, columns = weights.shape
        super().__init__(count, rows, columns)
        self._weights, self.products = weights, None
        if weights.dtype in OF_KERNEL:
            compile_plain_weights_in_background()
            is_transposed = not weights.is_contiguous()
            if not is_transposed or weights.mT.is_contiguous():
                is_bfloat16, at = weights.dtype == torch.bfloat16, weights.data_ptr()
                self.products = Products.of_numbers(at, count, rows, columns, is_bfloat16, is_transposed)

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(tokens, self._weights[index], bias)

    def write(self, index: int, out: torch.Tensor) -> None:
        out.copy_(self._weights[index])
