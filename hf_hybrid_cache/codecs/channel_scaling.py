"""Channel scaling: factors for each head's keys, or values, before they are rotated and quantized."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..storage import GRANULE


@dataclass(frozen=True, eq=False)
class ChannelScaling:
    """
    A linear map that is applied to each head's keys or values before quantization, and its inverse.

    Attributes:
        weights: float32, on the CPU: `[num_kv_heads, head_dim]`, a factor for each channel, or
            `[num_kv_heads, head_dim, head_dim]`, a matrix that row vectors are multiplied by.

    Raises:
        ValueError: it is of another shape, or has no inverse in float32.
    """

    weights: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.weights.shape
        if len(shape) not in (2, 3) or shape[1:2] != shape[-1:] or 0 in shape or self.weights.dtype != torch.float32:
            raise ValueError(
                f"Weights must be float32 [num_kv_heads, head_dim] or [num_kv_heads, head_dim, head_dim], got "
                f"{self.weights.dtype} {list(shape)}."
            )
        try:
            invertible = bool(np.isfinite(self.weights.numpy()).all() and np.isfinite(self.inverse_array).all())
        except torch.linalg.LinAlgError:
            invertible = False
        if not invertible:
            raise ValueError("Some of the weights have no inverse.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelScaling) and torch.equal(self.weights, other.weights)

    def __hash__(self) -> int:
        return hash((self.weights.shape, self.weights.numpy().tobytes()))

    def __deepcopy__(self, memo: dict) -> "ChannelScaling":
        return self

    @property
    def is_matrix(self) -> bool:
        """Whether channels are mixed."""
        return self.weights.dim() == 3

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The inverse factors, of the same shape."""
        weights = self.weights.double()
        return (torch.linalg.inv(weights) if self.is_matrix else 1 / weights).float().contiguous()

    @cached_property
    def inverse_array(self) -> np.ndarray:
        """`inverse`, for a kernel."""
        array: np.ndarray = self.inverse.numpy()
        return array

    def applied(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply `states`, `[batch, num_kv_heads, tokens, head_dim]`, by the weights, in float32."""
        return self._times(states, self.weights)

    def undone(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the inverse of `applied`."""
        return self._times(states, self.inverse)

    def require_fit(self, num_kv_heads: int, head_dim: int) -> None:
        """
        Check that the weights are for so many heads of this size.

        Raises:
            ValueError: it is not.
        """
        if tuple(self.weights.shape[:2]) != (num_kv_heads, head_dim):
            raise ValueError(
                f"The codec was chosen for {self.weights.shape[0]} KV heads of {self.weights.shape[1]}, and there are "
                f"{num_kv_heads} of {head_dim}. Use the codecs of a cache for this model, or rotate='auto'."
            )

    def _times(self, states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights = weights.to(states.device)
        return states.float() @ weights if self.is_matrix else states.float() * weights.unsqueeze(1)


def factors_for_keys(keys: torch.Tensor, query_squares: torch.Tensor | None) -> torch.Tensor:
    """
    Compute the factors of key channels that minimize the error of attention after rotation and quantization.

    A rotation spreads the error of the codes evenly over channels, in proportion to all of them; in a score a query
    weighs it. For factors f the expected square of a score's error is proportional to sum(f² k²) sum(q² / f²), of mean
    squares k² of the keys and q² of the queries. The least, (sum |k| |q|)², is at f = sqrt(|q| / |k|). It is never more
    than without factors or, as far as the numbers are spread alike, without a rotation. It does not change with the
    scale of a channel of the keys, if that of the queries is its inverse. Weighing keys by queries is as in SmoothQuant
    (arXiv:2211.10438) and QServe's SmoothAttention (arXiv:2405.04532), where no rotation follows.

    Args:
        keys: `[batch, num_kv_heads, blocks * 64, head_dim]`. Their mean in a block costs nothing, so k² is without it.
        query_squares: `[num_kv_heads, head_dim]`; `None` if no query was seen: then those are expected that go with the
            keys' squares as they do in models at hand, the less the more the keys' channels differ.

    Returns:
        float32 `[num_kv_heads, head_dim]`, at most 1.
    """
    blocks = keys.detach().to("cpu", torch.float64).unflatten(2, (-1, GRANULE)).numpy()
    # By NumPy, whose operations on small arrays are quicker.
    mean_squares = np.square(blocks.mean(axis=3)).mean(axis=(0, 2))
    squares = np.maximum(np.square(blocks).mean(axis=(0, 2, 3)) - mean_squares, 0)
    # A low that is far from zero is rounded, which widens the range.
    squares = _shares(squares + _ROUNDED_SHARE * mean_squares)
    if query_squares is None:
        differences = np.log(squares).var(axis=1, keepdims=True)
        surplus = np.maximum(differences - _USUAL_DIFFERENCES, 0)
        slope = (_USUAL_SLOPE * _USUAL_DIFFERENCES - surplus) / (_USUAL_DIFFERENCES + surplus)
        factors = squares ** ((slope - 1) / 4)
    else:
        products = squares * _shares(query_squares.to("cpu", torch.float64).numpy())
        # Few queries may have next to nothing in a channel by chance.
        products = np.maximum(products, _LEAST_PRODUCT * products.mean(axis=1, keepdims=True))
        factors = (products / np.square(squares)) ** 0.25
    factors = factors / factors.max(axis=1, keepdims=True)
    # A few digits do, and hide in which order threads have added up.
    return torch.from_numpy(factors).to(torch.bfloat16).float().clamp_min(_LEAST_FACTOR)


def _shares(squares: np.ndarray) -> np.ndarray:
    """Return fractions of the largest number of a head, `[num_kv_heads, head_dim]`, never zero."""
    largest = squares.max(axis=1, keepdims=True)
    shares: np.ndarray = np.divide(squares, largest, out=np.ones_like(squares), where=largest > 0)
    return np.maximum(shares, _LEAST_SHARE)


def rotation_matrix_for_values(values: torch.Tensor) -> torch.Tensor | None:
    """
    Compute the matrix for values that minimizes the error of attention's output after rotation and quantization.

    How much an error in a direction matters is up to the output projection, which a cache does not see. If it matters
    the same in all directions, the best matrix is C^(-1/4), of the values' second moments C, for the reason that
    `factors_for_keys` gives. If values are a mixture by a matrix M of such, the projection holds the inverse of M, and
    the best power goes to -1/2 as M outweighs what values of models at hand have. The logarithms of C's eigenvalues
    tell: their variance is what is usual, and that of M, and what comes from the number of tokens.

    Args:
        values: `[batch, num_kv_heads, tokens, head_dim]`.

    Returns:
        float32 `[num_kv_heads, head_dim, head_dim]`, symmetric; `None` where plain rotated values are nearly as good.
    """
    rows = values.detach().to("cpu", torch.float64).transpose(0, 1).flatten(1, 2)
    tokens, head_dim = rows.shape[1:]
    if tokens < _TOKENS_A_CHANNEL * head_dim:
        return None
    moments, axes = torch.linalg.eigh(rows.mT @ rows / tokens)
    eigenvalues = _shares(moments.numpy())
    gain = eigenvalues.mean(axis=1) / np.square(np.sqrt(eigenvalues).mean(axis=1))
    if gain.mean() < _WORTH_ROTATING:
        return None
    logarithms = np.log(eigenvalues)
    found = np.maximum(logarithms.var(axis=1, keepdims=True), _LEAST_SHARE)
    real = np.maximum(found - _CHANCE * head_dim / tokens, _LEAST_SHARE)
    power = real / found * np.maximum(0.5 - 0.25 * _USUAL_SPREAD / real, 0.25)
    scales = np.exp(power * (logarithms.mean(axis=1, keepdims=True) - logarithms))
    return ((axes * torch.from_numpy(scales).unsqueeze(1)) @ axes.mT).float()


# The share of rounding to bfloat16, with ranges of four to five standard deviations.
_ROUNDED_SHARE = 1e-6
_LEAST_SHARE = 1e-8
_LEAST_PRODUCT = 0.05
_LEAST_FACTOR = 2.0**-20
# Seen in SmolLM2-135M, Qwen2.5-Coder-0.5B and Gemma-3-270M (docs/log.md): the variance of the logarithms of the keys'
# mean squares, how the logarithms of the queries' follow them, and the variance of those of the eigenvalues of values.
_USUAL_DIFFERENCES, _USUAL_SLOPE, _USUAL_SPREAD = 0.8, 0.5, 1.8
# How far the number of tokens spreads these eigenvalues, times tokens a channel; how many are needed.
_CHANCE, _TOKENS_A_CHANNEL = 3, 2
# The least gain in the mean square error of values for which mixing is worth its work.
_WORTH_ROTATING = 1.3
