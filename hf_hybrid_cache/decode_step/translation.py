"""
What torch's operations are as instructions on rows.

A rule writes the instructions of one operation, and returns whether it could; arithmetic is float32 inside an
operation, and rounded once at its end, as torch's kernels for the CPU do it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..kernels import REDUCTIONS

Number = float | int
Operand = torch.Tensor | Number


class Writer(Protocol):
    """Writes instructions on tensors, which stand for the storages of a row."""

    def write(self, name: str, out: torch.Tensor, *operands: Operand, reduced: int = 0) -> bool:
        """Write an instruction over the dimensions of `out` and the last `reduced` ones; return whether one can."""

    def temporary(self, *shape: int) -> torch.Tensor:
        """A float32 tensor for what lies between two instructions."""


def translate(writer: Writer, name: str, outs: Sequence[torch.Tensor], args: Any, options: dict[str, Any]) -> bool:
    """
    Write what an operation of torch computes.

    Args:
        writer: takes the instructions.
        name: of the operation, without an underscore that says that it writes to its first argument.
        outs: its results, with memory.
        args: its arguments.
        options: its arguments by name.

    Returns:
        Whether there are such instructions.
    """
    rule = RULES.get(name)
    try:
        return rule is not None and rule(writer, outs[0], *args, outs=outs, **options)
    except TypeError:  # an argument that no rule takes
        return False


def _of(name: str) -> Callable[..., bool]:
    """The rule of an operation that is one instruction."""

    def write(writer: Writer, out: torch.Tensor, *operands: Operand, outs: object) -> bool:
        return writer.write(name, out, *operands)

    return write


def _sum(writer: Writer, out: torch.Tensor, x: Operand, y: Operand, alpha: Number = 1, sign: int = 1, **_: Any) -> bool:
    if alpha == 1:
        return writer.write("add" if sign == 1 else "sub", out, x, y)
    if isinstance(y, torch.Tensor):
        return writer.write("addcmul", out, x, y, sign * alpha)
    return writer.write("add", out, x, sign * alpha * y)


def _difference_from(writer: Writer, out: torch.Tensor, x: Operand, y: Operand, alpha: Number = 1, **_: Any) -> bool:
    return alpha == 1 and writer.write("sub", out, y, x)


def _quotient(writer: Writer, out: torch.Tensor, x: Operand, y: Operand, rounding_mode: Any = None, **_: Any) -> bool:
    return rounding_mode is None and writer.write("div", out, x, y)


def _power(writer: Writer, out: torch.Tensor, x: torch.Tensor, exponent: Operand, **_: Any) -> bool:
    if isinstance(exponent, torch.Tensor) or exponent not in _POWERS:
        return False
    if exponent == 3:
        square = writer.temporary(*x.shape)
        return writer.write("mul", square, x, x) and writer.write("mul", out, square, x)
    return writer.write(_POWERS[exponent], out, *[x] * (2 if exponent == 2 else 1))


_POWERS = {1: "copy", 2: "mul", 3: "", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _clamp(
    writer: Writer, out: torch.Tensor, x: torch.Tensor, min: Operand | None = None, max: Operand | None = None, **_: Any
) -> bool:
    if min is None or max is None:
        return writer.write("minimum" if min is None else "maximum", out, x, max if min is None else min)  # type: ignore
    between = writer.temporary(*out.shape)
    return writer.write("maximum", between, x, min) and writer.write("minimum", out, between, max)


def _hardtanh(writer: Writer, out: torch.Tensor, x: torch.Tensor, low: Number = -1, high: Number = 1, **_: Any) -> bool:
    return _clamp(writer, out, x, low, high)


def _filled(writer: Writer, out: torch.Tensor, *_: Any, **__: Any) -> bool:
    return True


def _constant(number: Number | None = None, at: int = 1) -> Callable[..., bool]:
    """The rule of an operation that fills with a number, or with its argument `at`."""

    def fill(writer: Writer, out: torch.Tensor, *args: Any, **_: Any) -> bool:
        return writer.write("copy", out, args[at] if number is None else number)

    return fill


def _copy(writer: Writer, out: torch.Tensor, x: Operand, *_: Any, **__: Any) -> bool:
    return writer.write("copy", out, x)


def _copy_to(writer: Writer, out: torch.Tensor, _to: torch.Tensor, x: Operand, *_: Any, **__: Any) -> bool:
    return writer.write("copy", out, x)


def _masked(writer: Writer, out: torch.Tensor, x: Operand, mask: Operand, number: Operand, **_: Any) -> bool:
    return writer.write("where", out, mask, number, x)


def _not(writer: Writer, out: torch.Tensor, x: Operand, **_: Any) -> bool:
    return out.dtype == torch.bool and writer.write("eq", out, x, 0.0)


def _both(writer: Writer, out: torch.Tensor, x: Operand, y: Operand, **_: Any) -> bool:
    return out.dtype == torch.bool and writer.write("mul", out, x, y)


def _either(writer: Writer, out: torch.Tensor, x: Operand, y: Operand, **_: Any) -> bool:
    return out.dtype == torch.bool and writer.write("maximum", out, x, y)


def _joined(writer: Writer, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0, **_: Any) -> bool:
    parts = out.split([each.shape[dim] if each.dim() == out.dim() else 0 for each in tensors], dim)
    return all(writer.write("copy", part, each) for part, each in zip(parts, tensors, strict=True) if part.numel())


def _stacked(writer: Writer, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0, **_: Any) -> bool:
    return all(writer.write("copy", out.select(dim, index), each) for index, each in enumerate(tensors))


def _reduced(
    name: str, writer: Writer, out: torch.Tensor, x: torch.Tensor, dims: Any = None, keep: bool = False, **_: Any
) -> bool:
    """Reduce some dimensions, or all, which are brought to the end."""
    dims = range(x.dim()) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    last = sorted(dim % x.dim() for dim in dims)
    kept = [dim for dim in range(x.dim()) if dim not in last]
    moved = x.permute(*kept, *last)
    flat = out.view([x.shape[dim] for dim in kept])
    return writer.write(name, flat, moved, reduced=len(last))


def _softmax(writer: Writer, out: torch.Tensor, x: torch.Tensor, dim: int, half_to_float: bool = False, **_: Any) -> bool:
    of_all = [1 if index == dim % x.dim() else size for index, size in enumerate(x.shape)]
    highest, total, shifted = writer.temporary(*of_all), writer.temporary(*of_all), writer.temporary(*x.shape)
    return (
        _reduced("amax", writer, highest, x, dim)
        and writer.write("sub", shifted, x, highest)
        and writer.write("exp", shifted, shifted)
        and _reduced("sum", writer, total, shifted, dim)
        and writer.write("div", out, shifted, total)
    )


def _layer_norm(
    writer: Writer, out: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, epsilon: float,
    *, outs: Sequence[torch.Tensor],
) -> bool:  # fmt: skip
    _, mean, factor = outs
    dims, centered, square = [*range(x.dim() - len(shape), x.dim())], *(writer.temporary(*x.shape) for _ in range(2))
    return (
        mean.dtype == torch.float32
        and _reduced("mean", writer, mean, x, dims)
        and writer.write("sub", centered, x, mean)
        and writer.write("mul", square, centered, centered)
        and _reduced("mean", writer, factor, square, dims)
        and writer.write("add", factor, factor, epsilon)
        and writer.write("rsqrt", factor, factor)
        and _weighted(writer, out, centered, factor, weight, bias)
    )


def _weighted(writer: Writer, out: torch.Tensor, x: torch.Tensor, factor: Operand, weight: Any, bias: Any = None) -> bool:
    """Write `x * factor * weight + bias`."""
    scaled = out if weight is None and bias is None else writer.temporary(*x.shape)
    if not writer.write("mul", scaled, x, factor):
        return False
    if bias is not None:
        return writer.write("addcmul", out, bias, scaled, 1.0 if weight is None else weight)
    return weight is None or writer.write("mul", out, scaled, weight)


def _rms_norm(
    writer: Writer, out: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: Any, epsilon: float | None,
    *, outs: Sequence[torch.Tensor],
) -> bool:  # fmt: skip
    square, factor = writer.temporary(*x.shape), outs[1]
    return (
        epsilon is not None
        and factor.dtype == torch.float32
        and writer.write("mul", square, x, x)
        and _reduced("mean", writer, factor, square, [*range(x.dim() - len(shape), x.dim())])
        and writer.write("add", factor, factor, epsilon)
        and writer.write("rsqrt", factor, factor)
        and _weighted(writer, out, x, factor, weight)
    )


def _silu(writer: Writer, out: torch.Tensor, x: torch.Tensor, **_: Any) -> bool:
    gate = writer.temporary(*x.shape)
    return writer.write("sigmoid", gate, x) and writer.write("mul", out, x, gate)


def _gelu(writer: Writer, out: torch.Tensor, x: torch.Tensor, approximate: str = "none", **_: Any) -> bool:
    inner, half = writer.temporary(*x.shape), writer.temporary(*x.shape)
    if approximate == "none":
        written = writer.write("mul", inner, x, math.sqrt(0.5)) and writer.write("erf", inner, inner)
    else:
        written = (
            writer.write("mul", inner, x, x)
            and writer.write("mul", inner, inner, x)
            and writer.write("addcmul", inner, x, inner, 0.044715)
            and writer.write("mul", inner, inner, math.sqrt(2 / math.pi))
            and writer.write("tanh", inner, inner)
        )
    return (
        written
        and writer.write("mul", half, x, 0.5)
        and writer.write("addcmul", out, half, half, inner)
    )  # fmt: skip


def _softplus(
    writer: Writer, out: torch.Tensor, x: torch.Tensor, beta: Number = 1, threshold: Number = 20, **_: Any
) -> bool:
    scaled, result, is_large = (writer.temporary(*x.shape) for _ in range(3))
    return (
        writer.write("mul", scaled, x, beta)
        and writer.write("gt", is_large, scaled, threshold)
        and writer.write("exp", result, scaled)
        and writer.write("log1p", result, result)
        and writer.write("div", result, result, beta)
        and writer.write("where", out, is_large, x, result)
    )


def _leaky(writer: Writer, out: torch.Tensor, x: torch.Tensor, slope: Number = 0.01, **_: Any) -> bool:
    scaled, is_positive = writer.temporary(*x.shape), writer.temporary(*x.shape)
    return (
        writer.write("mul", scaled, x, slope)
        and writer.write("gt", is_positive, x, 0.0)
        and writer.write("where", out, is_positive, x, scaled)
    )


_SAME = "neg abs exp expm1 log log1p tanh sigmoid erf sqrt rsqrt reciprocal mul maximum minimum eq ne lt le gt ge where"
RULES: dict[str, Callable[..., bool]] = {
    **{name: _of(name) for name in _SAME.split()},
    **{name: partial(_reduced, name) for name in REDUCTIONS},
    **dict.fromkeys(("clone", "_to_copy", "contiguous"), _copy),
    **dict.fromkeys(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"), _filled),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like", "zero"), _constant(0.0)),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _constant(1.0)),
    **dict.fromkeys(("full", "full_like", "fill"), _constant()),
    "new_full": _constant(at=2),
    "add": _sum,
    "sub": partial(_sum, sign=-1),
    "rsub": _difference_from,
    "div": _quotient,
    "pow": _power,
    "square": lambda writer, out, x, **_: writer.write("mul", out, x, x),
    "relu": lambda writer, out, x, **_: writer.write("maximum", out, x, 0.0),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda writer, out, x, most, **_: writer.write("minimum", out, x, most),
    "hardtanh": _hardtanh,
    "copy": _copy_to,
    "masked_fill": _masked,
    "logical_not": _not,
    "bitwise_not": _not,
    "logical_and": _both,
    "bitwise_and": _both,
    "logical_or": _either,
    "bitwise_or": _either,
    "cat": _joined,
    "stack": _stacked,
    "_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": _leaky,
}
