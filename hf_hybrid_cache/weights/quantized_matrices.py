"""Quantized matrices in host memory."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import (
    CACHE_LINE,
    PANEL_ROWS,
    PanelLayout,
    Products,
    compile_quantized_weights_in_background,
    dequantize_panels,
    factor_of,
    has_fast_bfloat16,
    multiply_many,
    quantize_panels,
    uses_gemm,
)
from ..storage import huge_page_memory
from .matrices import OF_KERNEL, Matrices, address

# With more tokens, arithmetic limits the products, and torch is faster.
MOST_TOKENS = 64
# Up to so many tokens, those of a decode step, are not rounded to 8 bits, though that would be faster.
_MOST_FINE_TOKENS = 32
# Bytes of a weight that are dequantized at a time, for torch: few enough to stay in the last-level cache, and at least
# as many rows as torch needs to be fast. With many tokens larger products are faster, though they leave the cache.
_DEQUANTIZED_BYTES, _DEQUANTIZED_BYTES_OF_MANY, _DEQUANTIZED_ROWS = 2**22, 2**24, 512
_MANY_TOKENS = 256
# Bytes that are converted at a time, if the quantizing kernel does not read the dtype.
_CONVERTED_BYTES = 2**26


@dataclass(frozen=True)
class Stack:
    """
    Matrices of one shape that are read once, one after the other, and need not be in memory together.

    Attributes:
        shape: `(matrices, rows, columns)`.
        matrices: each `[rows, columns]`, in host memory, of a floating-point dtype.
    """

    shape: tuple[int, int, int]
    matrices: Iterable[torch.Tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.matrices)


class QuantizedMatrices(Matrices):
    """
    One matrix, or several of one shape such as a layer's experts, quantized.

    Args:
        weights: `[matrices, rows, columns]`, in host memory, of a floating-point dtype; or a `Stack`.
        bits: of a code.
        group_size: number of columns that share a scale.

    Attributes:
        layout: of each matrix.
        factors: by which the scales of each matrix are multiplied.

    Raises:
        ValueError: some of the weights are infinite or not a number.
    """

    most_tokens = MOST_TOKENS
    products: Products

    def __init__(self, weights: torch.Tensor | Stack, bits: int, group_size: int):
        count, rows, columns = weights.shape
        self.layout = PanelLayout(bits, rows, columns, group_size)
        self._data = huge_page_memory(count * self.layout.num_bytes).view(count, -1)
        self.factors = [
            self._encode(weight.detach(), panels.numpy()) for weight, panels in zip(weights, self._data, strict=True)
        ]
        self.products = Products.of_panels(self._data.data_ptr(), self.layout, self.factors)
        super().__init__(count, rows, columns)

    @property
    def panels(self) -> torch.Tensor:
        """All panels as they are in memory, uint8 `[matrices, bytes]`."""
        return self._data

    @property
    def num_bytes(self) -> int:
        """Bytes of all codes."""
        return self._data.nbytes

    def multiply(self, tokens: torch.Tensor, index: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype, shape = tokens.dtype, tokens.shape
        num_tokens = tokens.numel() // shape[-1]
        is_bfloat16 = dtype == torch.bfloat16
        by_gemm = num_tokens > _MOST_FINE_TOKENS and uses_gemm(self.layout.bits, is_bfloat16)
        by_torch = num_tokens > MOST_TOKENS and not by_gemm
        # The kernels do not read float16. Without bfloat16 instructions torch is up to three times as fast in float32.
        if dtype == torch.float16 or (by_torch and is_bfloat16 and not has_fast_bfloat16()):
            return self.multiply(tokens.float(), index, None if bias is None else bias.float()).to(dtype)
        if by_torch:
            return self._multiply_dequantized(tokens.reshape(num_tokens, -1), index, bias).view(*shape[:-1], -1)
        out = tokens.new_empty(*shape[:-1], self.layout.rows)
        if num_tokens:
            tokens = tokens.contiguous()
            bias = None if bias is None else bias.contiguous()
            given = tokens.data_ptr(), num_tokens, is_bfloat16, address(bias), out.data_ptr()
            if by_gemm:
                multiply_many(self.products, index, *given)
            else:
                self.products.multiply(index, *given)
        return out

    def rows(self, index: int, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """
        Dequantized rows of a matrix, `[*indices, columns]`.

        Raises:
            IndexError: there is no such row.
        """
        wanted = indices.flatten().tolist()
        if wanted and not 0 <= min(wanted) <= max(wanted) < self.layout.rows:
            raise IndexError(
                f"index out of range: there are {self.layout.rows:,} rows, and ids from {min(wanted)} to {max(wanted)}"
            )
        places = {row: place for place, row in enumerate(dict.fromkeys(wanted))}
        layout, panels = self.layout, self._data[index].numpy()
        numbers = torch.empty(len(places), layout.columns)
        panel = np.empty((PANEL_ROWS, layout.columns), np.float32)
        for row, out in zip(places, numbers.numpy(), strict=True):
            first, lane = divmod(row, PANEL_ROWS)
            dequantize_panels(panels, layout, self.factors[index], panel[: layout.rows - first * PANEL_ROWS], first)
            out[:] = panel[lane]
        found = numbers.to(dtype)
        if len(places) < len(wanted):
            found = found[torch.tensor([places[row] for row in wanted])]
        return found.view(*indices.shape, self.layout.columns)

    def dense(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """A dequantized matrix, `[rows, columns]`."""
        out = torch.empty(self.layout.rows, self.layout.columns, dtype=dtype)
        self.write(index, out)
        return out

    def write(self, index: int, out: torch.Tensor) -> None:
        layout = self.layout
        if out.dtype in OF_KERNEL:
            self._decoded(index, 0, out)
        else:
            out.copy_(self._decoded(index, 0, torch.empty(layout.rows, layout.columns)))

    def _multiply_dequantized(self, tokens: torch.Tensor, index: int, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply many tokens, `[tokens, columns]`, by torch, dequantizing some panels at a time."""
        layout, item = self.layout, tokens.element_size()
        out = torch.empty(len(tokens), layout.rows, dtype=tokens.dtype)
        dequantized_bytes = _DEQUANTIZED_BYTES if len(tokens) < _MANY_TOKENS else _DEQUANTIZED_BYTES_OF_MANY
        height = max(_DEQUANTIZED_ROWS, dequantized_bytes // (layout.columns * item)) // PANEL_ROWS * PANEL_ROWS
        # Rows that are a power of two apart would map to few sets of the processor's cache.
        width = (-(-layout.columns * item // CACHE_LINE) | 1) * CACHE_LINE // item
        scratch = torch.empty(min(height, layout.panels * PANEL_ROWS), width, dtype=tokens.dtype)
        with torch.no_grad():  # a product with `out=` has no gradient
            for first in range(0, layout.rows, height):
                weight = self._decoded(index, first // PANEL_ROWS, scratch).t()
                rows = slice(first, first + weight.shape[1])
                if bias is None:
                    torch.mm(tokens, weight, out=out[:, rows])
                else:
                    torch.addmm(bias[rows], tokens, weight, out=out[:, rows])
        return out

    def _decoded(self, index: int, first: int, out: torch.Tensor) -> torch.Tensor:
        """Dequantize the rows of the panels from `first` on into `out`, as many as it has or are left; return them."""
        rows = out[: self.layout.rows - first * PANEL_ROWS]
        dequantize_panels(self._data[index].numpy(), self.layout, self.factors[index], _as_array(rows), first)
        return rows[:, : self.layout.columns]

    def _encode(self, weight: torch.Tensor, panels: np.ndarray) -> float:
        """Quantize a matrix into panels; return its factor."""
        layout = self.layout
        largest = max(float(weight.max()), -float(weight.min()))
        if not math.isfinite(largest):
            raise ValueError("has numbers that are infinite or not a number")
        factor = factor_of(largest)
        is_read = weight.dtype in OF_KERNEL
        step = layout.panels if is_read else max(1, _CONVERTED_BYTES // (PANEL_ROWS * layout.columns * 4))
        for first in range(0, layout.panels, step):
            rows = weight[first * PANEL_ROWS : (first + step) * PANEL_ROWS].contiguous()
            numbers = _as_array(rows if is_read else rows.float())
            quantize_panels(numbers, layout, factor, panels, first)
            compile_quantized_weights_in_background(numbers.dtype, has_experts=len(self._data) > 1)
        return factor


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """An array for the kernels, which read bfloat16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
