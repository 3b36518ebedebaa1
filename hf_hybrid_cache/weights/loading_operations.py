"""Quantizing as one of transformers' operations on tensors, between a file and the model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist

from ..storage import give_back_file_pages
from .coverage import Covered
from .quantized_weight import QuantizedWeight
from .width import Width


class WeightsToQuantize:
    """
    The weights of a model that are quantized as soon as they are read.

    Args:
        width: of the codes.

    Attributes:
        width: of the codes.
        refused_shapes: shapes in the model of weights that have other shapes in the files, by name.
    """

    def __init__(self, width: Width):
        self.width = width
        self.reset({})

    def reset(self, covered: dict[str, Covered]) -> None:
        """Begin anew with these weights, under each of their names."""
        self.refused_shapes: dict[str, torch.Size] = {}
        self._covered = covered
        self._in_files: set[str] = set()

    def note_in_files(self, name: str) -> bool:
        """Note that the files have a weight, before the first is read; whether it may be quantized when it is read."""
        self._in_files.add(name)
        return name in self._covered and name not in self.refused_shapes

    def find(self, name: str) -> Covered | None:
        """
        The weight of that name, if it is to be quantized as soon as it is read.

        A tied weight that the files have under two names is not: transformers compares the two first.
        """
        covered = self._covered.get(name)
        if covered is None:
            return None
        in_files = [other for other in self._in_files if self._covered.get(other) is covered]
        return covered if len(in_files) < 2 else None

    def refuse(self, name: str) -> None:
        """Leave a weight to transformers, which refuses its shape in the files."""
        self.refused_shapes[name] = self._covered[name].parameter.shape


class QuantizeWeights(ConversionOps):
    """Quantizes weights after all other operations on them."""

    def __init__(self, weights: WeightsToQuantize):
        self._weights = weights

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """
        Quantize the weights that are to be quantized.

        Args:
            input_dict: tensors, or lists of one tensor, by the names of the weights.
            source_patterns: not used.
            target_patterns: not used.
            kwargs: not used.

        Returns:
            Quantized weights by name; tensors that are not to be quantized, or cannot be, as they were.
        """
        return {name: self._quantized(name, _only(value)) for name, value in input_dict.items()}

    def _quantized(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        covered = self._weights.find(name)
        if covered is None or isinstance(tensor, QuantizedWeight):
            return tensor
        if tensor.shape != covered.parameter.shape:
            self._weights.refuse(name)
            return tensor
        matrices = _given_back(tensor if covered.is_stacked else tensor[None])
        quantized = _quantized_or_none(covered, matrices, tensor.dtype, self._weights.width)
        return tensor if quantized is None else quantized

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizeWeights":
        return self  # all converters share one object


class QuantizeExperts(ConversionOps):
    """
    Replaces operations that stack a layer's experts: each expert goes through them alone, and is quantized.

    Args:
        operations: those for which `stack_single_experts` is true.
        weights: the weights to quantize.
    """

    def __init__(self, operations: Sequence[ConversionOps], weights: WeightsToQuantize):
        self._operations, self._weights = list(operations), weights

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """
        Quantize one expert after the other.

        Args:
            input_dict: lists of tensors, one for each expert, by the pattern of their names.
            source_patterns: of the names in the files.
            target_patterns: of the name in the model.
            kwargs: transformers' other arguments; `full_layer_name` is the name in the model.

        Returns:
            The quantized weight by the pattern of its name; the stacked tensor if it is not to be quantized, or cannot
            be.
        """
        others = {"source_patterns": source_patterns, "target_patterns": target_patterns, **kwargs}
        covered = self._weights.find(kwargs["full_layer_name"])
        if covered is not None and (quantized := self._quantized(covered, input_dict, others)) is not None:
            return quantized
        return self._through(input_dict, others)

    def _quantized(self, covered: Covered, tensors: dict[str, Any], others: dict[str, Any]) -> dict[str, Any] | None:
        count = covered.parameter.shape[0]
        if not covered.is_stacked or any(len(of_pattern) != count for of_pattern in tensors.values()):
            return None
        first = {pattern: [of_pattern[0]] for pattern, of_pattern in tensors.items()}
        ((target, expert),) = self._through(first, others).items()
        if expert.shape[1:] != covered.parameter.shape[1:]:
            return None
        matrices = self._one_by_one(tensors, count, others)
        twin = _quantized_or_none(covered, matrices, expert.dtype, self._weights.width)
        return None if twin is None else {target: twin}

    def _one_by_one(
        self, tensors: dict[str, list[torch.Tensor]], count: int, others: dict[str, Any]
    ) -> Iterator[torch.Tensor]:
        """The experts, each `[rows, columns]` as in the stack; the file's pages of one are freed after it is used."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizeExperts":
        return self  # all converters share one object


def stack_single_experts(operations: Sequence[ConversionOps]) -> bool:
    """Whether operations stack a list of matrices, and treat each matrix in the stack as they would treat it alone."""
    first, *others = operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and all(type(each) is Concatenate and each.dim in (1, 2) for each in others)
    )


def _quantized_or_none(
    covered: Covered, matrices: Iterator[torch.Tensor], dtype: torch.dtype, width: Width
) -> QuantizedWeight | None:
    """The quantized weight; `None` if its numbers are not finite, which is reported when the model is loaded."""
    try:
        return covered.quantized_one_by_one(matrices, covered.parameter.shape, dtype, width)
    except ValueError:
        return None


def _given_back(matrices: torch.Tensor) -> Iterator[torch.Tensor]:
    """Matrices one by one; the file's pages of one are freed after it is used."""
    for matrix in matrices:
        yield matrix
        give_back_file_pages(matrix)


def _only(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor
