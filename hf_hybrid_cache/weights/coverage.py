"""The weights of a model that can be quantized, to what width, and why others cannot be."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import HybridCacheError
from ..kernels import WEIGHT_BITS, PanelLayout
from ..scalars import checked_integer
from .quantized_matrices import QuantizedMatrices, Stack
from .quantized_weight import QuantizedWeight

QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_SIZE, HEAD_BITS = 32, 8
_ALLOWED_GROUP_SIZES = (32, 64, 128)
# Smaller matrices would be mostly padding; gates are among them, and are better left exact.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32


class NothingToQuantizeError(HybridCacheError, ValueError):
    """No weight of a model, or none of the requested ones, can be quantized; the message says why."""


class Width(NamedTuple):
    """
    Bits and group size of quantized weights.

    Attributes:
        bits: of a code.
        group_size: number of weights in a row that share a scale.
        head_bits: of a code of the output head.
    """

    bits: int
    group_size: int
    head_bits: int

    @classmethod
    def checked(
        cls, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS, name: str = "bits"
    ) -> "Width":
        """
        A width from a user's numbers.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is not supported.
        """
        bits = checked_integer(name, bits)
        group_size = checked_integer("group_size", group_size)
        head_bits = checked_integer("head_bits", head_bits)
        if bits not in WEIGHT_BITS:
            raise ValueError(f"{name} must be 8 or 4, got {bits}. Leave it out for the weights as they are.")
        if head_bits not in WEIGHT_BITS:
            raise ValueError(f"head_bits must be 8 or 4, got {head_bits}.")
        if group_size not in _ALLOWED_GROUP_SIZES:
            raise ValueError(f"group_size must be 32, 64 or 128, got {group_size}.")
        return cls(bits, group_size, head_bits)


@dataclass(frozen=True)
class Covered:
    """
    A parameter that can be quantized.

    Attributes:
        name: its first name in the model.
        parameter: the parameter itself.
        holders: all modules that hold it, each with the name of its attribute; several if weights are tied.
        is_transposed: whether its columns come before its rows.
        is_head: whether it is the output head.
    """

    name: str
    parameter: nn.Parameter
    holders: list[tuple[nn.Module, str]]
    is_transposed: bool
    is_head: bool

    def quantized(self, matrices: Iterable[torch.Tensor], dtype: torch.dtype, width: Width) -> QuantizedWeight:
        """
        Quantize the parameter.

        Args:
            matrices: of the stack, or the only one, in host memory; read once, and need not be in memory together.
            dtype: of the model.
            width: of the codes.

        Raises:
            ValueError: some of the numbers are not finite.
        """
        # Tensors that are made in inference mode cannot be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            of_rows = (matrix.t() if self.is_transposed else matrix for matrix in matrices)
            quantized = QuantizedMatrices(Stack(self._sizes, of_rows), self._bits(width), width.group_size)
            return QuantizedWeight.make(quantized, None if self.is_stacked else 0, self.is_transposed, dtype)

    def as_stack(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of the parameter as a stack of matrices."""
        return numbers if self.is_stacked else numbers[None]

    def quantized_bytes(self, width: Width) -> int:
        """Bytes of the codes."""
        count, rows, columns = self._sizes
        return count * PanelLayout(self._bits(width), rows, columns, width.group_size).num_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix, not quantized."""
        return self.parameter.nbytes // self._sizes[0]

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter stacks the matrices of several experts."""
        return self.parameter.dim() == 3

    def hold(self, parameter: torch.Tensor) -> None:
        """Put another parameter into the modules in its place."""
        for module, attribute in self.holders:
            module._parameters[attribute] = parameter  # type: ignore[assignment]

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Number of matrices, rows and columns."""
        shape = self.parameter.shape
        rows, columns = reversed(shape[-2:]) if self.is_transposed else shape[-2:]
        return shape[0] if self.is_stacked else 1, rows, columns

    def _bits(self, width: Width) -> int:
        return width.head_bits if self.is_head else width.bits


def coverage(model: PreTrainedModel, only_experts: bool = False) -> tuple[list[Covered], dict[str, str]]:
    """
    Find the parameters that can be quantized, and the reasons why other matrices cannot, by name.

    Linear layers, the output head, the token embedding, and stacked experts can be quantized.

    Args:
        model: any model.
        only_experts: leave out all but stacked experts.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, attribute))
    head, routers = model.get_output_embeddings(), _routers(model)
    covered, left = [], {}
    for name, parameter in model.named_parameters():
        modules = [module for module, _ in holders[id(parameter)]]
        is_expert = parameter.dim() == 3 and any(map(holds_experts, modules))
        if parameter.dim() < 2 or (only_experts and not is_expert):
            continue
        orientations = {_orientation(*holder, model) for holder in holders[id(parameter)]}
        is_router = any(module in routers for module in modules)
        reason = "is of a router" if is_router else _reason_to_leave(parameter, modules, orientations)
        if reason is None:
            is_head = any(module is head for module in modules)
            covered.append(Covered(name, parameter, holders[id(parameter)], orientations == {True}, is_head))
        else:
            left[name] = reason
    return covered, left


def require_some(covered: list[Covered], left: dict[str, str], model: PreTrainedModel) -> None:
    """
    Check that at least one weight can be quantized.

    Raises:
        NothingToQuantizeError: there is none.
    """
    if not covered:
        reasons = "; ".join(f"{name} {reason}" for name, reason in list(left.items())[:3])
        raise NothingToQuantizeError(
            f"No weight of {type(model).__name__} can be quantized: {reasons or 'it has no matrices'}."
        )


def holds_experts(module: nn.Module) -> bool:
    """Whether a module's parameters of three dimensions are stacked experts."""
    # transformers' `use_experts_implementation` sets these attributes on the modules that it decorates.
    return hasattr(module, "num_experts") and isinstance(getattr(module, "is_transposed", None), bool)


def _routers(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of routers: of the class whose scores transformers records, unless it is that of a whole block."""
    found: set[nn.Module] = set()
    for part in model.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        kind: Any = getattr(recorded, "target_class", recorded)
        for router in part.modules() if isinstance(kind, type) else ():
            if isinstance(router, kind) and not any(map(holds_experts, router.modules())):
                found.update(router.modules())
    return found


def _orientation(module: nn.Module, attribute: str, model: PreTrainedModel) -> bool | None:
    """Whether a module uses a parameter as a transposed matrix; `None` if not as a matrix, or if that is not known."""
    if attribute == "weight" and isinstance(module, nn.Linear):
        return False
    if attribute == "weight" and isinstance(module, Conv1D):
        return True
    if attribute == "weight" and isinstance(module, nn.Embedding) and module is model.get_input_embeddings():
        return False
    is_expert = holds_experts(module) and module._parameters[attribute].dim() == 3  # type: ignore[union-attr]
    return bool(module.is_transposed) if is_expert else None


def _reason_to_leave(parameter: nn.Parameter, modules: list[nn.Module], orientations: set[bool | None]) -> str | None:
    if isinstance(parameter, QuantizedWeight):
        return "is quantized already"
    if type(parameter.data) is not torch.Tensor or parameter.dtype not in QUANTIZED_DTYPES:
        return f"is of type {type(parameter.data).__name__}, {parameter.dtype}"
    users = " and ".join(sorted({type(module).__name__ for module in modules}))
    if None in orientations or len(orientations) > 1:
        return f"is used by {users}, not as the matrix of a linear layer"
    rows, columns = reversed(parameter.shape[-2:]) if orientations == {True} else parameter.shape[-2:]
    if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
        return f"has only {rows} outputs and {columns} inputs"
    return None
