"""Finding the weights of a model that can be quantized, the modules that hold them, and why others cannot be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import HybridCacheError
from ..kernels import PanelLayout
from .quantized_matrices import QuantizedMatrices, Stack
from .quantized_weight import QuantizedWeight
from .width import Width

QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Smaller matrices would be mostly padding; gates and routers are among them, and are better left exact.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32


class NothingToQuantizeError(HybridCacheError, ValueError):
    """No weight of a model, or none of the requested ones, can be quantized; the message says why."""


class Holder(NamedTuple):
    """A module that holds a parameter, and the name of its attribute."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Covered:
    """
    A parameter that can be quantized.

    Attributes:
        name: its first name in the model.
        parameter: the parameter itself.
        holders: all modules that hold it; several if weights are tied.
        is_transposed: whether its columns come before its rows.
        is_head: whether it is the output head.
    """

    name: str
    parameter: nn.Parameter
    holders: list[Holder]
    is_transposed: bool
    is_head: bool

    def quantized(self, data: torch.Tensor, width: Width) -> QuantizedWeight:
        """
        Quantize the parameter.

        Args:
            data: its numbers, in host memory.
            width: of the codes.

        Raises:
            ValueError: some of the numbers are not finite.
        """
        return self.quantized_one_by_one(data if data.dim() == 3 else data[None], data.shape, data.dtype, width)

    def quantized_one_by_one(
        self, matrices: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, width: Width
    ) -> QuantizedWeight:
        """
        Quantize the parameter from matrices that need not be in memory together.

        Args:
            matrices: of the stack, or the only one, in host memory; read once.
            shape: of the whole parameter.
            dtype: of the model.
            width: of the codes.

        Raises:
            ValueError: some of the numbers are not finite.
        """
        count, rows, columns = self._sizes(shape)
        # Tensors that are made in inference mode cannot be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            of_rows = (matrix.t() if self.is_transposed else matrix for matrix in matrices)
            quantized = QuantizedMatrices(Stack((count, rows, columns), of_rows), self._bits(width), width.group_size)
            stacked, which = (count, None) if len(shape) == 3 else (None, 0)
            return QuantizedWeight.make(quantized, stacked, which, self.is_transposed, dtype)

    def quantized_bytes(self, width: Width) -> int:
        """Bytes of the codes."""
        count, rows, columns = self._sizes(self.parameter.shape)
        return count * PanelLayout(self._bits(width), rows, columns, width.group_size).num_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix, not quantized."""
        return self.parameter.nbytes // self._sizes(self.parameter.shape)[0]

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter stacks the matrices of several experts."""
        return self.parameter.dim() == 3

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Number of matrices, rows and columns."""
        count = shape[0] if len(shape) == 3 else 1
        rows, columns = reversed(shape[-2:]) if self.is_transposed else shape[-2:]
        return count, rows, columns

    def _bits(self, width: Width) -> int:
        return width.head_bits if self.is_head else width.bits

    def hold(self, parameter: torch.Tensor) -> None:
        """Put another parameter into the modules in its place."""
        for module, attribute in self.holders:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


def coverage(model: PreTrainedModel) -> tuple[list[Covered], dict[str, str]]:
    """
    Find the parameters that can be quantized, and the reasons why other matrices cannot, by name.

    Linear layers, the output head, the token embedding, and stacked experts can be quantized.
    """
    holders: dict[int, list[Holder]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(Holder(module, attribute))
    head = model.get_output_embeddings()
    covered, left = [], {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        orientations = {_orientation(holder, model) for holder in holders[id(parameter)]}
        reason = _reason_to_leave(parameter, holders[id(parameter)], orientations)
        if reason is None:
            is_head = any(module is head for module, _ in holders[id(parameter)])
            covered.append(Covered(name, parameter, holders[id(parameter)], orientations == {True}, is_head))
        else:
            left[name] = reason
    return covered, left


def holds_experts(module: nn.Module) -> bool:
    """Whether a module's parameters of three dimensions are stacked experts."""
    # transformers' `use_experts_implementation` sets these attributes on the modules that it decorates.
    return hasattr(module, "num_experts") and isinstance(getattr(module, "is_transposed", None), bool)


def _orientation(holder: Holder, model: PreTrainedModel) -> bool | None:
    """Whether a module uses a parameter as a transposed matrix; `None` if not as a matrix, or if that is not known."""
    module, attribute = holder
    if attribute == "weight" and isinstance(module, nn.Linear):
        return False
    if attribute == "weight" and isinstance(module, Conv1D):
        return True
    if attribute == "weight" and isinstance(module, nn.Embedding) and module is model.get_input_embeddings():
        return False
    is_expert = holds_experts(module) and module._parameters[attribute].dim() == 3  # type: ignore[union-attr]
    return bool(module.is_transposed) if is_expert else None


def _reason_to_leave(parameter: nn.Parameter, holders: list[Holder], orientations: set[bool | None]) -> str | None:
    if isinstance(parameter, QuantizedWeight):
        return "is quantized already"
    if type(parameter.data) is not torch.Tensor or parameter.dtype not in QUANTIZED_DTYPES:
        return f"is of type {type(parameter.data).__name__}, {parameter.dtype}"
    users = " and ".join(sorted({type(module).__name__ for module, _ in holders}))
    if None in orientations or len(orientations) > 1:
        return f"is used by {users}, not as the matrix of a linear layer"
    rows, columns = reversed(parameter.shape[-2:]) if orientations == {True} else parameter.shape[-2:]
    if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
        return f"has only {rows} outputs and {columns} inputs"
    return None
