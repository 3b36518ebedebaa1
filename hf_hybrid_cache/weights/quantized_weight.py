"""
Tensors in the place of a parameter: a quantized weight, and a weight that stays in host memory.

A quantized weight is a tensor with a shape and a dtype, stored as codes. Modules call `linear`, `matmul`, `addmm`,
`embedding` and `grouped_mm` as before, and these are computed from the codes. Any other operation gets the dequantized
numbers, so its result is right, but slower. Codes never change: an operation that would write to them is refused.
Nothing of torch or transformers is patched.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import HybridCacheError
from ..graph_breaks import outside_of_graphs
from .quantized_matrices import QuantizedMatrices

_HOST = torch.device("cpu")


class _StayingWeight(torch.Tensor):
    """Answers the methods that a model calls on its parameters when it is moved, as a weight that stays where it is."""

    stays: bool

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.stays:
            return super().to(*args, **kwargs)
        kwargs.pop("copy", None)
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return self if dtype in (None, self.dtype) else self.converted(dtype)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.stays else super().cpu(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.stays else super().cuda(*args, **kwargs)

    def converted(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another dtype."""
        return self.detach().to(dtype)


class HostWeight(_StayingWeight, nn.Parameter):
    """
    A parameter that stays in host memory while the rest of its model is on a device.

    `model.to(device)` leaves it there; `model.to(dtype)` converts it. `weight.detach().to(device)` gives a copy on a
    device.
    """

    stays = True


# No TypeError: torch's operators catch one, and `weight += 1` would become `weight + 1`.
class ReadOnlyWeightError(HybridCacheError, RuntimeError):
    """An operation would write to a quantized weight; nothing has changed."""

    def __init__(self, what: str):
        super().__init__(
            f"{what}, and codes never change. Change weights before they are quantized, or put "
            "nn.Parameter(weight.dense()) in their place; load_state_dict(..., assign=True) does so with all it loads."
        )


class _ReadOnly(torch.Tensor):
    """Dequantized numbers for any operation but one that would write to them, as that would be lost."""

    def dense(self) -> torch.Tensor:
        """The dequantized numbers, as a tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_STORAGE:
            raise TypeError(
                "A quantized weight is not stored as numbers of its own. Save or share the model before its weights "
                "are quantized, or take weight.dense()."
            )
        if func in _NOT_DISPATCHED:
            result = func(*_densified(args), **kwargs)
            if isinstance(result, np.ndarray):
                result.flags.writeable = False
            return result
        # The tensor itself answers for shape, dtype and device; operations that need numbers reach __torch_dispatch__.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write and any(isinstance(each, _ReadOnly) for each in tree_leaves(given)):
                raise ReadOnlyWeightError(f"{func} would write to a quantized weight")
        result = func(*_densified(args), **_densified(kwargs))
        # A view shares memory with a copy that nobody else has: what is written there would be lost, too.
        aliases = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        return tree_map_only(torch.Tensor, _View.of, result) if is_view else result


def _densified(given: Any) -> Any:
    """Arguments with dequantized numbers in the place of quantized weights and their views."""
    return tree_map_only(_ReadOnly, lambda each: each.dense(), given)


class _View(_ReadOnly):
    """A view of a quantized weight's dequantized numbers."""

    _numbers: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor) -> "_View":
        view = torch.Tensor._make_wrapper_subclass(
            _View, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=_HOST
        )
        view._numbers = numbers
        return view

    def dense(self) -> torch.Tensor:
        return self._numbers


class QuantizedWeight(_StayingWeight, _ReadOnly):
    """
    One quantized matrix, or a stack of matrices, or one matrix of a stack; perhaps transposed.

    Attributes:
        matrices: the codes.
        which: index of the matrix in `matrices`; `None` for the whole stack, `[matrices, rows, columns]`.
        is_transposed: whether columns come before rows.
        stays: whether it stays in host memory, quantized, when its model is moved to a device.
    """

    matrices: QuantizedMatrices
    which: int | None
    is_transposed: bool
    _shape: torch.Size
    _dtype: torch.dtype

    @staticmethod
    def make(
        matrices: QuantizedMatrices, which: int | None, is_transposed: bool, dtype: torch.dtype
    ) -> "QuantizedWeight":
        layout = matrices.layout
        sizes = (layout.columns, layout.rows) if is_transposed else (layout.rows, layout.columns)
        shape = torch.Size((matrices.count, *sizes) if which is None else sizes)
        weight = torch.Tensor._make_wrapper_subclass(QuantizedWeight, shape, dtype=dtype, device=_HOST)
        weight.matrices, weight.which, weight.is_transposed, weight._shape = matrices, which, is_transposed, shape
        weight._dtype, weight.stays = dtype, False
        weight._is_param = True  # makes `isinstance(weight, nn.Parameter)` true
        return weight

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape; torch's own property would call `__torch_function__` in every product."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype; a property for the same reason as `shape`."""
        return self._dtype

    @property
    def is_stacked(self) -> bool:
        """Whether the weight is a stack of matrices."""
        return self.which is None

    def transposed(self) -> "QuantizedWeight":
        """The weight with its last two axes exchanged; the codes are shared."""
        return self._again(not self.is_transposed, self.dtype)

    def one(self, index: int) -> "QuantizedWeight":
        """One matrix of a stack."""
        count = self._shape[0]
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of bounds for {count} matrices")
        return QuantizedWeight.make(self.matrices, index % count, self.is_transposed, self.dtype)

    def dense(self) -> torch.Tensor:
        """The dequantized numbers, as a new tensor."""
        with torch.no_grad():
            if self.which is None:
                weights = torch.stack([self.one(index).dense() for index in range(self._shape[0])])
            else:
                weights = self.matrices.dense(self.which, self.dtype)
                weights = weights.t() if self.is_transposed else weights
        return weights

    def converted(self, dtype: torch.dtype) -> torch.Tensor:
        return self._again(self.is_transposed, dtype) if dtype.is_floating_point else self.dense().to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedWeight":
        # Codes never change, so copies of a model share them.
        return self._again(self.is_transposed, self.dtype)

    def _again(self, is_transposed: bool, dtype: torch.dtype) -> "QuantizedWeight":
        weight = QuantizedWeight.make(self.matrices, self.which, is_transposed, dtype)
        weight.stays = self.stays
        return weight

    @classmethod
    @outside_of_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func) or _ANSWERS.get(getattr(func, "_qualified_op_name", None))
        if answer is not None:
            result = answer(*args, **kwargs)
            if result is not None:
                return result
        return super().__torch_function__(func, types, args, kwargs)


class _Product(torch.autograd.Function):
    """A product with gradients of tokens and bias; the weight has none."""

    @staticmethod
    def forward(
        context: Any, tokens: torch.Tensor, bias: torch.Tensor | None, matrices: QuantizedMatrices, index: int
    ) -> torch.Tensor:
        context.matrices, context.index, context.dtype = matrices, index, tokens.dtype
        return matrices.multiply(tokens.detach(), index, None if bias is None else bias.detach())

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0]
        of_tokens = gradient @ context.matrices.dense(context.index, context.dtype)
        of_bias = gradient.flatten(0, -2).sum(0) if context.needs_input_grad[1] else None
        return of_tokens, of_bias, None, None


def _multiplied(tokens: Any, weight: QuantizedWeight, bias: Any = None) -> torch.Tensor | None:
    """Compute `tokens @ matrix.T + bias`; return `None` for operands that are left to torch."""
    matrices, dtype = weight.matrices, weight._dtype
    fits = (
        tokens.dtype == dtype
        and not isinstance(tokens, _ReadOnly)
        and tokens.shape[-1:] == matrices.token_sizes
        and tokens.is_cpu
        and (bias is None or _is_bias(bias, weight))
        and not torch.is_autocast_enabled("cpu")
    )
    if not fits:
        return None
    assert weight.which is not None
    if torch.is_grad_enabled() and (tokens.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(tokens, bias, matrices, weight.which)
    return matrices.multiply(tokens, weight.which, bias)


def _is_bias(bias: Any, weight: QuantizedWeight) -> bool:
    is_plain = bias.dtype == weight._dtype and bias.is_cpu and not isinstance(bias, _ReadOnly)
    return is_plain and bias.shape == weight.matrices.out_sizes


def _is_matrix(weight: Any, is_transposed: bool) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.which is not None and weight.is_transposed == is_transposed


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    return _multiplied(input, weight, bias) if _is_matrix(weight, False) else None


def _matmul(input: Any, other: Any, **options: Any) -> torch.Tensor | None:
    return _multiplied(input, other) if _is_matrix(other, True) and not options else None


def _addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> torch.Tensor | None:
    return _multiplied(mat1, mat2, input) if _is_matrix(mat2, True) and not options else None


def _embedding(input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any) -> Any:
    is_known = _is_matrix(weight, False) and max_norm is None and input.dtype in (torch.int64, torch.int32)
    return weight.matrices.rows(weight.which, input, weight.dtype) if is_known else None


def _grouped_mm(input: Any, weight: Any, *, offs: Any = None, **options: Any) -> torch.Tensor | None:
    """Compute `grouped_mm` as transformers calls it; each offset ends the rows of `input` of one expert."""
    is_known = isinstance(weight, QuantizedWeight) and weight.is_stacked and weight.is_transposed and not options
    if not is_known or offs is None:
        return None
    out = torch.zeros(len(input), weight.shape[2], dtype=input.dtype)
    start = 0
    for index, end in enumerate(offs.tolist()):
        if end > start:
            product = _multiplied(input[start:end], weight.one(index))
            if product is None:
                return None
            out[start:end] = product
        start = max(start, end)
    return out


def _item(weight: Any, index: Any) -> QuantizedWeight | None:
    if not isinstance(weight, QuantizedWeight) or not weight.is_stacked:
        return None
    if isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype in (torch.int64, torch.int32):
        index = int(index)
    return weight.one(index) if type(index) is int else None


def _transpose(weight: QuantizedWeight, *dims: Any, dim0: Any = None, dim1: Any = None) -> QuantizedWeight | None:
    dims = dims or (dim0, dim1)
    last = weight.dim() - 1
    return weight.transposed() if {dim % weight.dim() for dim in dims} == {last - 1, last} else None


def _transpose_all(weight: QuantizedWeight) -> QuantizedWeight | None:
    return None if weight.is_stacked else weight.transposed()


def _cannot_adopt(*_: Any) -> bool:
    """Tell a module that is converted that it has to replace this tensor, instead of changing its data."""
    return False


def _same(weight: QuantizedWeight, *_: Any) -> QuantizedWeight:
    return weight


_ANSWERS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.__getitem__: _item,
    torch.transpose: _transpose,
    torch.Tensor.transpose: _transpose,
    torch.Tensor.swapaxes: _transpose,
    torch.t: _transpose_all,
    torch.Tensor.t: _transpose_all,
    torch.Tensor.T.__get__: _transpose_all,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: QuantizedWeight.transposed,  # type: ignore[attr-defined]
    torch.Tensor.detach: _same,
    torch.Tensor.data.__get__: _same,  # type: ignore[attr-defined]
    torch._has_compatible_shallow_copy_type: _cannot_adopt,
    functional.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
}
# torch computes these outside of its dispatcher, which would ask the subclass for its numbers.
_NOT_DISPATCHED = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__repr__,
    torch.Tensor.__deepcopy__,
}
# These need the memory of plain numbers, which a quantized weight does not have.
_OF_STORAGE = {
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__dlpack__,
    torch.Tensor.apply_,
    torch.Tensor.map_,
    torch.Tensor.map2_,
}
