"""Which weights of a model can be of few bits, which modules hold them, and why the others cannot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..kernels import PanelLayout
from .coded_matrices import CodedMatrices, Stack
from .coded_weight import CodedWeight
from .width import Width

CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Smaller ones would be mostly what fills them up; among them are gates and routers, which are better left exact.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32


class NothingToCodeError(ValueError):
    """None of a model's weights can be of few bits, or none of those that were asked for; the message says why."""


class Holder(NamedTuple):
    """A module that holds a parameter, and as what."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Covered:
    """
    A parameter that can be of few bits.

    Attributes:
        name: the first that the model has for it.
        parameter: the module's own.
        holders: all modules that hold it; several where weights are tied.
        is_transposed: its columns come before its rows.
        is_head: it gives the logits.
    """

    name: str
    parameter: nn.Parameter
    holders: list[Holder]
    is_transposed: bool
    is_head: bool

    def coded(self, data: torch.Tensor, width: Width) -> CodedWeight:
        """
        The parameter in few bits.

        Args:
            data: its numbers, in host memory.
            width: of the codes.

        Raises:
            ValueError: some of the numbers are not finite.
        """
        return self.coded_one_by_one(data if data.dim() == 3 else data[None], data.shape, data.dtype, width)

    def coded_one_by_one(
        self, matrices: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, width: Width
    ) -> CodedWeight:
        """
        The parameter in few bits, of matrices that need not be in memory together.

        Args:
            matrices: those of a stack, or the only one, in host memory; read once.
            shape: of all together.
            dtype: in which the model computes.
            width: of the codes.

        Raises:
            ValueError: some of the numbers are not finite.
        """
        count, rows, columns = self._sizes(shape)
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            of_rows = (matrix.t() if self.is_transposed else matrix for matrix in matrices)
            coded = CodedMatrices(Stack((count, rows, columns), of_rows), self._bits(width), width.group_size)
            stacked, which = (count, None) if len(shape) == 3 else (None, 0)
            return CodedWeight.make(coded, stacked, which, self.is_transposed, dtype)

    def coded_bytes(self, width: Width) -> int:
        """What the codes take."""
        count, rows, columns = self._sizes(self.parameter.shape)
        return count * PanelLayout(self._bits(width), rows, columns, width.group_size).num_bytes

    @property
    def matrix_bytes(self) -> int:
        """What one matrix takes as it is."""
        return self.parameter.nbytes // self._sizes(self.parameter.shape)[0]

    @property
    def is_stacked(self) -> bool:
        """Whether it is the matrices of several experts."""
        return self.parameter.dim() == 3

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        count = shape[0] if len(shape) == 3 else 1
        rows, columns = reversed(shape[-2:]) if self.is_transposed else shape[-2:]
        return count, rows, columns

    def _bits(self, width: Width) -> int:
        return width.head_bits if self.is_head else width.bits

    def hold(self, parameter: torch.Tensor) -> None:
        """Let the modules hold this one in its place."""
        for module, attribute in self.holders:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


def coverage(model: PreTrainedModel) -> tuple[list[Covered], dict[str, str]]:
    """
    The parameters that can be of few bits, and by name why other matrices cannot.

    Linear layers, the output head with the embedding that is tied to it, the embedding of tokens, and experts that
    transformers keeps as stacked matrices.
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
    """Whether the matrices of three dimensions that a module holds are experts, one after the other."""
    # What transformers' `use_experts_implementation` notes on the modules that it decorates.
    return hasattr(module, "num_experts") and isinstance(getattr(module, "is_transposed", None), bool)


def _orientation(holder: Holder, model: PreTrainedModel) -> bool | None:
    """Whether a module uses a parameter as a transposed matrix; `None` if not as a matrix, or nobody knows."""
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
    if isinstance(parameter, CodedWeight):
        return "is of few bits already"
    if type(parameter.data) is not torch.Tensor or parameter.dtype not in CODED_DTYPES:
        return f"is of type {type(parameter.data).__name__}, {parameter.dtype}"
    users = " and ".join(sorted({type(module).__name__ for module, _ in holders}))
    if None in orientations or len(orientations) > 1:
        return f"is used by {users}, not as the matrix of a linear layer"
    rows, columns = reversed(parameter.shape[-2:]) if orientations == {True} else parameter.shape[-2:]
    if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
        return f"has only {rows} outputs and {columns} inputs"
    return None
