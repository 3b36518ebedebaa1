"""
Other weights for the same function: the states in the cache change, the logits do not.

A codec that only fits what it was tuned on loses where channels of the keys have other scales, outliers or another
order, or values are mixtures of what they were. For decoders whose attention is that of Llama: projections of queries,
keys, values and the output by these names, a rotary embedding of halves, and no norm of the keys.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiments.common.synthetic import kv_heads

# Factors of some pairs of channels, as in models whose keys have outliers.
_OUTLIER, _OUTLYING_PAIRS = 30.0, 2


@dataclass(frozen=True)
class Change:
    """
    The change to one layer, as matrices `[num_kv_heads, head_dim, head_dim]` in float64.

    Attributes:
        keys: multiply the keys of each head; the queries are multiplied by the inverse, transposed.
        values: multiply the values; the output projection takes it back.
    """

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


Make = Callable[[int, int, torch.Generator], Change]


def _scaled_pairs(sigma: float, num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Change:
    """Each pair of channels that is rotated together times a lognormal factor."""
    factors = torch.exp(sigma * _normal(generator, num_kv_heads, head_dim // 2))
    return Change(keys=torch.diag_embed(factors.repeat(1, 2)))


def _outlying_pairs(num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Change:
    """A few pairs of each head times a large factor."""
    order = _normal(generator, num_kv_heads, head_dim // 2).argsort(dim=1)
    factors = torch.where(order < _OUTLYING_PAIRS, _OUTLIER, 1.0).double()
    return Change(keys=torch.diag_embed(factors.repeat(1, 2)))


def _mixed_values(condition: float, num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Change:
    """Values times a matrix whose singular values go up to the condition number, in equal steps of the logarithm."""
    left, right = (torch.linalg.qr(_normal(generator, num_kv_heads, head_dim, head_dim)).Q for _ in range(2))
    scales = torch.logspace(-0.5, 0.5, head_dim, base=condition, dtype=torch.float64)
    return Change(values=(left * scales) @ right)


def _permuted_values(num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Change:
    orders = _normal(generator, num_kv_heads, head_dim).argsort(dim=1)
    return Change(values=torch.eye(head_dim, dtype=torch.float64)[orders])


REPARAMETRIZATIONS: dict[str, Make] = {
    "keys scaled, sigma 0.5": partial(_scaled_pairs, 0.5),
    "keys scaled, sigma 1": partial(_scaled_pairs, 1.0),
    "keys scaled, sigma 2": partial(_scaled_pairs, 2.0),
    "keys, pairs times 30": _outlying_pairs,
    "values mixed, orthogonal": partial(_mixed_values, 1.0),
    "values mixed, condition 10": partial(_mixed_values, 10.0),
    "values mixed, condition 100": partial(_mixed_values, 100.0),
    "values permuted": _permuted_values,
}


@contextmanager
def reparametrized(model: PreTrainedModel, name: str) -> Iterator[None]:
    """
    Give `model` other weights for the same function, for as long as this lasts.

    Args:
        model: of Llama's kind.
        name: a key of `REPARAMETRIZATIONS`.

    Raises:
        ValueError: its attention is of another kind.
    """
    layers = [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "o_proj")]
    if not layers or any(hasattr(layer, norm) for layer in layers for norm in ("q_norm", "k_norm")):
        raise ValueError(f"{type(model).__name__} has no attention of Llama's kind, or norms of its keys.")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if "_proj." in key}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for layer in layers:
                _apply(layer, REPARAMETRIZATIONS[name](*kv_heads(model.config), generator))
        yield
    finally:
        model.load_state_dict(before, strict=False)


def _apply(attention: Any, change: Change) -> None:
    if change.keys is not None:
        _map_results(attention.k_proj, change.keys)
        _map_results(attention.q_proj, torch.linalg.inv(change.keys).mT)
    if change.values is not None:
        _map_results(attention.v_proj, change.values)
        inverse, head_dim = torch.linalg.inv(change.values), change.values.shape[1]
        columns = attention.o_proj.weight.double().unflatten(1, (len(inverse), -1, head_dim))
        attention.o_proj.weight.copy_(torch.einsum("okgd,kde->okge", columns, inverse).flatten(1))


def _map_results(projection: nn.Linear, matrices: torch.Tensor) -> None:
    """Multiply the output for each KV head, or for each of its query heads, by its matrix."""
    rows = [projection.weight] if projection.bias is None else [projection.weight, projection.bias.unsqueeze(1)]
    for part in rows:
        by_head = part.double().unflatten(0, (len(matrices), -1, matrices.shape[1]))
        part.copy_(torch.einsum("kde,kgeh->kgdh", matrices, by_head).flatten(0, 2))


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def require_same_function(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """
    Return the largest difference of the logits from those of the original model.

    Raises:
        ValueError: further than rounding takes them.
    """
    largest = float((expected - actual).abs().max())
    if not largest < _ROUNDING * float(expected.abs().max()) or math.isnan(largest):
        raise ValueError(f"The reparametrized model says something else: logits differ by up to {largest:.3g}.")
    return largest


_ROUNDING = 1e-3
