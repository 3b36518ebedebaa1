"""
Operations of torch as instructions on rows.

Arithmetic is float32 inside an operation, and rounded once at its end, as torch's kernels for the CPU do it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..kernels import REDUCTIONS

Operand = torch.Tensor | float
# Writes an instruction; returns whether there is one for such numbers.
Write = Callable[..., bool]


def translate(write: Write, name: str, outs: Sequence[torch.Tensor], args: Any, options: dict[str, Any]) -> bool:
    """
    Write what an operation of torch computes.

    Args:
        write: takes the name of an instruction, the result and operands; a reduction is over their last dimension.
        name: of the operation, without an underscore that says that it writes to its first argument.
        outs: its results, with memory.
        args: its arguments.
        options: its arguments by name.

    Returns:
        Whether there are such instructions.
    """
    rule = RULES.get(name)
    try:
        return rule is not None and rule(write, outs[0], *args, **options)
    except TypeError:  # an argument that no rule takes
        return False


def _sum(write: Write, out: torch.Tensor, x: Operand, y: Operand, alpha: float = 1, sign: int = 1) -> bool:
    if alpha == 1:
        return write("add" if sign == 1 else "sub", out, x, y)
    if isinstance(y, torch.Tensor):
        return write("addcmul", out, x, y, sign * alpha)
    return write("add", out, x, sign * alpha * y)


def _power(write: Write, out: torch.Tensor, x: torch.Tensor, exponent: Operand) -> bool:
    if exponent == 2:
        return write("mul", out, x, x)
    name = {1: "copy", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)  # type: ignore[arg-type]
    return name is not None and write(name, out, x)


def _of_truth(name: str, *others: float) -> Callable[..., bool]:
    """The rule of an operation on truth alone."""

    def rule(write: Write, out: torch.Tensor, *operands: Operand) -> bool:
        return out.dtype == torch.bool and write(name, out, *operands, *others)

    return rule


def _joined(write: Write, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> bool:
    parts = out.split([each.shape[dim] if each.dim() == out.dim() else 0 for each in tensors], dim)
    return all(write("copy", part, each) for part, each in zip(parts, tensors, strict=True) if part.numel())


def _stacked(write: Write, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> bool:
    return all(write("copy", out.select(dim, index), each) for index, each in enumerate(tensors))


def _reduced(name: str, write: Write, out: torch.Tensor, x: torch.Tensor, dims: Any = None, keep: bool = False) -> bool:
    """Reduce a dimension, which is brought to the end; others may be of one number."""
    dims = range(x.dim()) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    last = {dim % x.dim() for dim in dims}
    reduced = [dim for dim in last if x.shape[dim] > 1] or [*last]
    kept = [dim for dim in range(x.dim()) if dim != reduced[0]]
    has_one = len(reduced) == 1 or out.numel() == x.numel()
    moved = x.permute(*kept, reduced[0])
    return has_one and write(name, out.view(moved.shape[:-1]), moved, is_reduction=True)


_SAME = "neg abs exp expm1 log log1p tanh sigmoid erf sqrt rsqrt reciprocal mul maximum minimum eq ne lt le gt ge where"
RULES: dict[str, Callable[..., bool]] = {
    **{name: lambda write, out, *operands, name=name: write(name, out, *operands) for name in (*_SAME.split(), "div")},
    **{name: partial(_reduced, name) for name in REDUCTIONS},
    **dict.fromkeys(("clone", "_to_copy", "to"), lambda write, out, x, *_: write("copy", out, x)),
    **dict.fromkeys(("empty", "new_empty", "empty_like", "empty_strided"), lambda *_: True),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like", "zero"), lambda write, out, *_: write("copy", out, 0.0)),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda write, out, *_: write("copy", out, 1.0)),
    **dict.fromkeys(("full", "full_like", "fill"), lambda write, out, _, number: write("copy", out, number)),
    **dict.fromkeys(("relu", "clamp_min"), lambda write, out, x, least=0.0: write("maximum", out, x, least)),
    **dict.fromkeys(("logical_not", "bitwise_not"), _of_truth("eq", 0.0)),
    **dict.fromkeys(("logical_and", "bitwise_and"), _of_truth("mul")),
    **dict.fromkeys(("logical_or", "bitwise_or"), _of_truth("maximum")),
    "clamp_max": lambda write, out, x, most: write("minimum", out, x, most),
    "add": _sum,
    "sub": partial(_sum, sign=-1),
    "rsub": lambda write, out, x, y: write("sub", out, y, x),
    "pow": _power,
    "copy": lambda write, out, _, x, *__: write("copy", out, x),
    "masked_fill": lambda write, out, x, mask, number: write("where", out, mask, number, x),
    "cat": _joined,
    "stack": _stacked,
}


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shares = torch.exp(x.float() - x.amax(dim, keepdim=True))
    return (shares / shares.sum(dim, keepdim=True)).to(torch.float32 if half_to_float else x.dtype)


def _layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    dims, states = [*range(-len(shape), 0)], x.float()
    mean = states.mean(dims, keepdim=True)
    centered = states - mean
    factor = torch.rsqrt((centered * centered).mean(dims, keepdim=True) + epsilon)
    out = centered * factor if weight is None else centered * factor * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, factor


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, epsilon: float | None) -> Any:
    states, epsilon = x.float(), torch.finfo(x.dtype).eps if epsilon is None else epsilon
    factor = torch.rsqrt((states * states).mean([*range(-len(shape), 0)], keepdim=True) + epsilon)
    return (states * factor if weight is None else states * factor * weight).to(x.dtype), factor


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    states = x.float()
    if approximate == "none":
        return (0.5 * states * (1 + torch.erf(states * math.sqrt(0.5)))).to(x.dtype)
    inner = math.sqrt(2 / math.pi) * (states + 0.044715 * (states * states * states))
    return (0.5 * states * (1 + torch.tanh(inner))).to(x.dtype)


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = x.float() * beta
    return torch.where(scaled > threshold, x.float(), torch.log1p(torch.exp(scaled)) / beta).to(x.dtype)


def _clamp(x: torch.Tensor, least: Any = None, most: Any = None) -> torch.Tensor:
    x = x if least is None else x.clamp_min(least)
    return x if most is None else x.clamp_max(most)


# Operations that are several, as functions of the same arguments.
FORMULAS: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "gelu": _gelu,
    "silu": lambda x: (x.float() * torch.sigmoid(x.float())).to(x.dtype),
    "softplus": _softplus,
    "mish": lambda x: (x.float() * torch.tanh(functional.softplus(x.float()))).to(x.dtype),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "clamp": lambda x, min=None, max=None: _clamp(x, min, max),
    "hardtanh": lambda x, low=-1, high=1: _clamp(x, low, high),
}
