"""Coding as one of transformers' operations on tensors, between a file and the model."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist

from ..storage import give_back_file_pages
from .coded_weight import CodedWeight
from .coverage import Covered
from .width import Width


class Plan(Protocol):
    """What is to be coded, and how wide."""

    @property
    def width(self) -> Width: ...

    def to_be_coded(self, name: str) -> Covered | None: ...

    def leave(self, name: str) -> None: ...


class CodeWeights(ConversionOps):
    """Codes what a weight, or several, have become at the end of all other operations."""

    def __init__(self, plan: Plan):
        self._plan = plan

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """
        Code what is to be coded.

        Args:
            input_dict: tensors, or lists of one, by the names of the weights.
            source_patterns: not asked for here.
            target_patterns: likewise.
            kwargs: likewise.

        Returns:
            Coded weights in their place; tensors that are not to be coded, or cannot be, stay.
        """
        return {name: self._coded(name, _only(value)) for name, value in input_dict.items()}

    def _coded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        covered = self._plan.to_be_coded(name)
        if covered is None or isinstance(tensor, CodedWeight):
            return tensor
        if tensor.shape != covered.parameter.shape:
            self._plan.leave(name)
            return tensor
        matrices = _given_back(tensor if covered.is_stacked else tensor[None])
        coded = _coded_or_none(covered, matrices, tensor.dtype, self._plan)
        return tensor if coded is None else coded

    def __deepcopy__(self, memo: dict[int, Any]) -> "CodeWeights":
        return self  # the plan is one for all weights


class CodeExperts(ConversionOps):
    """
    Takes the place of operations that stack a layer's experts: each goes through them by itself, and is coded.

    Args:
        operations: of which `are_of_single_experts` is true.
        plan: what is to be coded.
    """

    def __init__(self, operations: Sequence[ConversionOps], plan: Plan):
        self._operations, self._plan = list(operations), plan

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """
        Code one expert after the other.

        Args:
            input_dict: by the pattern of their names, a list of tensors, one of each expert.
            source_patterns: of these names.
            target_patterns: of the model's name.
            kwargs: what transformers tells operations besides; among it the full name of the model's weight.

        Returns:
            The coded weight by the pattern of its name; the stack as it is where it is not to be coded, or cannot be.
        """
        others = {"source_patterns": source_patterns, "target_patterns": target_patterns, **kwargs}
        covered = self._plan.to_be_coded(kwargs["full_layer_name"])
        if covered is not None and (coded := self._coded(covered, input_dict, others)) is not None:
            return coded
        return self._through(input_dict, others)

    def _coded(self, covered: Covered, tensors: dict[str, Any], others: dict[str, Any]) -> dict[str, Any] | None:
        count = covered.parameter.shape[0]
        if not covered.is_stacked or any(len(of_pattern) != count for of_pattern in tensors.values()):
            return None
        first = {pattern: [of_pattern[0]] for pattern, of_pattern in tensors.items()}
        ((target, expert),) = self._through(first, others).items()
        if expert.shape[1:] != covered.parameter.shape[1:]:
            return None
        twin = _coded_or_none(covered, self._one_by_one(tensors, count, others), expert.dtype, self._plan)
        return None if twin is None else {target: twin}

    def _one_by_one(
        self, tensors: dict[str, list[torch.Tensor]], count: int, others: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Each expert `[rows, columns]` as it would be in the stack."""
        for index in range(count):
            parts = {pattern: [of_pattern[index]] for pattern, of_pattern in tensors.items()}
            read = [part for (part,) in parts.values()]
            (stack,) = self._through(parts, others).values()
            yield stack[0]
            for part in read:
                give_back_file_pages(part)

    def _through(self, tensors: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        for operation in self._operations:
            tensors = operation.convert(tensors, **others)
        return tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> "CodeExperts":
        return self  # the plan is one for all weights


def are_of_single_experts(operations: Sequence[ConversionOps]) -> bool:
    """Whether operations stack a list of matrices, and then do to each of them what they would do to it alone."""
    first, *others = operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and all(type(each) is Concatenate and each.dim in (1, 2) for each in others)
    )


def _coded_or_none(
    covered: Covered, matrices: Iterator[torch.Tensor], dtype: torch.dtype, plan: Plan
) -> CodedWeight | None:
    """`None` where numbers are not finite: such a weight is reported when all is loaded."""
    try:
        return covered.coded_one_by_one(matrices, covered.parameter.shape, dtype, plan.width)
    except ValueError:
        return None


def _given_back(matrices: torch.Tensor) -> Iterator[torch.Tensor]:
    for matrix in matrices:
        yield matrix
        give_back_file_pages(matrix)


def _only(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor
