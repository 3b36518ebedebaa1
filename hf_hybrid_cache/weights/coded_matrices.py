"""Weights of few bits in host memory: coding them, and the products of tokens with them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from ..kernels import (
    CACHE_LINE,
    PANEL_ROWS,
    ExpertCall,
    PanelLayout,
    PanelProducts,
    compile_coded_weights_in_background,
    decode_panels,
    decode_row,
    encode_panels,
    factor_of,
    multiply_many,
    uses_gemm,
)
from ..storage import huge_page_memory
from .matrices import Matrices

# With more tokens the products are bound by arithmetic, and torch's are faster.
MOST_TOKENS = 64
# Tokens that keep 16 bits though rounding them to 8 would be faster: those of a decode step.
_MOST_FINE_TOKENS = 32
# Rows of a weight that are decoded at a time, for torch: little enough to stay in the last cache, and as many as torch
# needs to be fast. With many tokens it gains more from larger products than the cache does.
_DECODED_BYTES, _DECODED_BYTES_OF_MANY, _DECODED_ROWS = 2**22, 2**24, 512
_MANY_TOKENS = 256
# Rows that are coded at a time, if they are of a type that the kernel does not read.
_CONVERTED_BYTES = 2**26


@dataclass(frozen=True)
class Stack:
    """
    Matrices of one shape that need not be in memory together: read once, one after the other.

    Attributes:
        shape: `(matrices, rows, columns)`.
        matrices: each `[rows, columns]`, in host memory, of a floating type.
    """

    shape: tuple[int, int, int]
    matrices: Iterable[torch.Tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.matrices)


class CodedMatrices(Matrices):
    """
    One weight, or several of one shape such as a layer's experts, in few bits.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating type; or a stack of them, read one by one.
        bits: of a code.
        group_size: columns that share a scale.

    Attributes:
        layout: of each of them.

    Raises:
        ValueError: some of the weights are infinite or not a number.
    """

    most_tokens = MOST_TOKENS

    def __init__(self, weights: torch.Tensor | Stack, bits: int, group_size: int):
        count, rows, columns = weights.shape
        self.layout = PanelLayout(bits, rows, columns, group_size)
        self._data = huge_page_memory(count * self.layout.num_bytes).view(count, -1)
        self._factors = [
            self._encode(weight.detach(), panels.numpy()) for weight, panels in zip(weights, self._data, strict=True)
        ]
        self._products = PanelProducts(self._data.data_ptr(), self.layout, self._factors)
        super().__init__(count, rows, columns)

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype, shape = tokens.dtype, tokens.shape
        num_tokens = tokens.numel() // self.layout.columns
        is_bfloat16 = dtype == torch.bfloat16
        by_gemm = num_tokens > _MOST_FINE_TOKENS and uses_gemm(is_bfloat16)
        by_torch = num_tokens > MOST_TOKENS and not by_gemm
        # The kernels do not read float16; without instructions for it, torch takes bfloat16 three times as long.
        if dtype == torch.float16 or (by_torch and is_bfloat16 and not _has_bfloat16()):
            return self.multiply(tokens.float(), index, None if bias is None else bias.float()).to(dtype)
        if by_torch:
            return self._multiply_decoded(tokens.reshape(num_tokens, -1), index, bias).view(*shape[:-1], -1)
        out = tokens.new_empty(shape[:-1] + self.out_sizes)
        if num_tokens:
            tokens = tokens.contiguous()
            bias_at = 0
            if bias is not None:
                bias = bias.contiguous()
                bias_at = bias.data_ptr()
            given = tokens.data_ptr(), num_tokens, is_bfloat16, bias_at, out.data_ptr()
            if by_gemm:
                multiply_many(self._data[index].data_ptr(), self.layout, self._factors[index], *given)
            else:
                self._products.multiply(index, *given)
        return out

    def multiply_chosen(
        self, tokens: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        dtype = tokens.dtype
        if dtype == torch.float16:  # which the kernels do not read
            return self.multiply_chosen(tokens.float(), chosen, None if bias is None else bias.float()).to(dtype)
        return self._chosen_by(self._products.multiply_chosen, tokens, chosen, bias)

    def _kernel_of_experts(self, down: Matrices, dtype: torch.dtype) -> Callable[[ExpertCall], int] | None:
        return partial(self._products.add_up_experts, down._products) if isinstance(down, CodedMatrices) else None

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What rows of the first matrix stand for, `[*indices, columns]`."""
        found, places = torch.unique(indices, return_inverse=True)
        numbers = torch.empty(len(found), self.layout.columns)
        panels = self._data[0].numpy()
        for row, out in zip(found.tolist(), numbers.numpy(), strict=True):
            decode_row(panels, self.layout, self._factors[0], row, out)
        return numbers.to(dtype)[places]

    def dense(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """What a matrix stands for, `[rows, columns]`."""
        out = torch.empty(self.layout.rows, self.layout.columns, dtype=dtype)
        self.write(index, out)
        return out

    def write(self, index: int, out: torch.Tensor) -> None:
        layout = self.layout
        if out.dtype in (torch.float32, torch.bfloat16):
            self._decoded(index, 0, layout.panels, out)
        else:
            out.copy_(self._decoded(index, 0, layout.panels, torch.empty(layout.rows, layout.columns)))

    def _multiply_decoded(self, tokens: torch.Tensor, index: int, bias: torch.Tensor | None) -> torch.Tensor:
        """The same of many tokens `[tokens, columns]` by torch, with what some panels at a time stand for."""
        layout, item = self.layout, tokens.element_size()
        out = torch.empty(len(tokens), layout.rows, dtype=tokens.dtype)
        decoded_bytes = _DECODED_BYTES if len(tokens) < _MANY_TOKENS else _DECODED_BYTES_OF_MANY
        height = max(_DECODED_ROWS, decoded_bytes // (layout.columns * item)) // PANEL_ROWS * PANEL_ROWS
        # Lines that are a power of two apart would share a few places of the cache.
        width = (-(-layout.columns * item // CACHE_LINE) | 1) * CACHE_LINE // item
        scratch = torch.empty(min(height, layout.panels * PANEL_ROWS), width, dtype=tokens.dtype)
        with torch.no_grad():  # a product that is told where to write has no gradient
            for first in range(0, layout.rows, height):
                weight = self._decoded(index, first // PANEL_ROWS, (first + height) // PANEL_ROWS, scratch).t()
                rows = slice(first, first + weight.shape[1])
                if bias is None:
                    torch.mm(tokens, weight, out=out[:, rows])
                else:
                    torch.addmm(bias[rows], tokens, weight, out=out[:, rows])
        return out

    def _decoded(self, index: int, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """What the rows of some panels stand for, `[rows, columns]`: in a part of `out`, float32 or bfloat16."""
        part, where = self.layout.part(first, last)
        decode_panels(self._data[index, where].numpy(), part, self._factors[index], _as_array(out[: part.rows]))
        return out[: part.rows, : part.columns]

    def _encode(self, weight: torch.Tensor, panels: np.ndarray) -> float:
        """Write the panels; returns the weight's factor."""
        layout = self.layout
        largest = max(float(weight.max()), -float(weight.min()))
        if not math.isfinite(largest):
            raise ValueError("has numbers that are infinite or not a number")
        factor = factor_of(largest)
        is_read = weight.dtype in (torch.float32, torch.bfloat16)
        step = layout.panels if is_read else max(1, _CONVERTED_BYTES // (PANEL_ROWS * layout.columns * 4))
        for first in range(0, layout.panels, step):
            rows = weight[first * PANEL_ROWS : (first + step) * PANEL_ROWS].contiguous()
            part, where = layout.part(first, first + step)
            numbers = _as_array(rows if is_read else rows.float())
            encode_panels(numbers, part, factor, panels[where])
            compile_coded_weights_in_background(numbers.dtype, has_experts=len(self._data) > 1)
        return factor


@cache
def _has_bfloat16() -> bool:
    """Whether torch has products of bfloat16 that are made for the processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """As the kernels read it: bfloat16 by its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
