"""Channel scaling: its effect on the error of attention, and its soundness for any states."""

import math

import pytest
import torch

from hf_hybrid_cache import minmax
from hf_hybrid_cache.codecs import ChannelScaling, MinMaxCodec
from hf_hybrid_cache.codecs.channel_scaling import factors_for_keys, rotation_matrix_for_values

from common.channel_scaled import random_factors, random_rotation_matrix

TOKENS = 1024


def keys_and_queries(dim: int, spread: float, seed: int, bias: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and queries `[1, 2, tokens, dim]`, whose channels differ each in its own way."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys, queries = (random(1, 2, TOKENS, dim) * torch.exp(spread * random(1, 2, 1, dim)) for _ in range(2))
    return keys + bias * random(1, 2, 1, dim), queries


def score_error(codec: MinMaxCodec, keys: torch.Tensor, queries: torch.Tensor) -> float:
    """Return the mean square of the error of q·k."""
    decoded = torch.empty_like(keys)
    codec.decode(codec.encode(keys), decoded)
    return float(((decoded - keys).double() @ queries.double().mT).square().mean())


def fitted(bits: int, states: torch.Tensor, queries: torch.Tensor | None, role: str) -> MinMaxCodec:
    codec = getattr(minmax(bits), role)
    squares = None if queries is None else queries.double().square().mean(dim=(0, 2))
    result = codec.fitted(states, squares)
    assert result.is_fitted
    return result


@pytest.mark.default("pairs")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("bias", [0.0, 10.0])
def test_scores_when_keys_are_scaled_then_are_as_good_as_rotated_or_plain(
    bits: int, dim: int, spread: float, bias: float
):
    keys, queries = keys_and_queries(dim, spread, seed=dim, bias=bias)
    chosen = score_error(fitted(bits, keys, queries, "keys"), keys, queries)
    others = [score_error(minmax(bits, rotate=rotate).keys, keys, queries) for rotate in (True, False)]
    # With 2 bits, codes of numbers that are not rotated cover less of a range, for a reason that is not in this error.
    assert chosen < (1.25 if bits == 2 else 1.1) * min(others)


def test_where_channels_of_keys_and_queries_differ_they_are_much_better():
    keys, queries = keys_and_queries(128, 2.0, seed=3)
    chosen = score_error(fitted(4, keys, queries, "keys"), keys, queries)
    assert chosen < 0.5 * min(score_error(minmax(4, rotate=rotate).keys, keys, queries) for rotate in (True, False))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_key_channel_scales_when_queries_have_inverses_then_change_nothing(bits: int, sigma: float):
    keys, queries = keys_and_queries(64, 0.5, seed=1)
    scales = torch.exp(sigma * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(2)))
    errors = [
        score_error(fitted(bits, some_keys, some_queries, "keys"), some_keys, some_queries)
        for some_keys, some_queries in ((keys, queries), (keys * scales, queries / scales))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_without_queries_keys_whose_channels_differ_wildly_are_evened_out():
    keys, queries = keys_and_queries(64, 0.3, seed=1)
    scales = torch.exp(2 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(2)))
    keys, queries = keys * scales, queries / scales
    rotated = score_error(minmax(4, rotate=True).keys, keys, queries)
    assert score_error(fitted(4, keys, None, "keys"), keys, queries) < rotated / 20


def test_a_single_query_is_no_worse_a_guide_than_none_at_all():
    keys, queries = keys_and_queries(64, 0.5, seed=1)
    errors = [score_error(fitted(4, keys, seen, "keys"), keys, queries) for seen in (queries, queries[:, :, :1], None)]
    assert errors[0] < errors[1] < 2 * errors[0]
    assert errors[1] < 2 * errors[2]


def output_error(bits: int, values: torch.Tensor, mixture: torch.Tensor) -> float:
    """Return the mean square of the error of values that a projection takes out of their quantized mixtures again."""
    given = values @ mixture
    codec = fitted(bits, given, None, "values")
    decoded = torch.empty_like(given)
    codec.decode(codec.encode(given), decoded)
    return float(((decoded - given).double() @ torch.linalg.inv(mixture.double())).square().mean())


@pytest.mark.default("pairs")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("condition", [1, 10, 100])
def test_mixtures_of_values_lose_little_more_than_the_values(bits: int, dim: int, condition: int):
    generator = torch.Generator().manual_seed(dim)
    values = torch.randn(1, 2, 2048, dim, generator=generator)
    axes = [torch.linalg.qr(torch.randn(2, dim, dim, generator=generator)).Q for _ in range(2)]
    scales = torch.logspace(-0.5, 0.5, dim, base=condition)
    assert output_error(bits, values, (axes[0] * scales) @ axes[1]) < 2.2 * output_error(bits, values, torch.eye(dim))


def test_values_when_gain_or_tokens_are_few_then_are_not_mixed():
    values = torch.randn(2, 3, 640, 64, generator=torch.Generator().manual_seed(0))
    assert rotation_matrix_for_values(values) is None
    uneven = values * torch.logspace(-1, 1, 64)
    rotation_matrix = rotation_matrix_for_values(uneven)
    assert rotation_matrix is not None
    # Directions are stretched and not turned.
    torch.testing.assert_close(rotation_matrix, rotation_matrix.mT)
    assert rotation_matrix_for_values(uneven[:1, :, :64]) is None


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dead", [0, 1, 31, 32])
def test_any_finite_states_give_finite_weights_whose_inverse_is_finite(scale: float, dead: int):
    states = torch.randn(1, 2, 320, 32, generator=torch.Generator().manual_seed(0)) * scale
    states[..., :dead] = 0
    states[:, 1, :, dead:] = scale  # does not change over tokens
    for squares in (None, torch.zeros(2, 32), torch.full((2, 32), 1e-37), torch.full((2, 32), 3e38)):
        weights = factors_for_keys(states, squares)
        assert torch.isfinite(ChannelScaling(weights).inverse).all()
        assert (weights <= 1).all()
    rotation_matrix = rotation_matrix_for_values(states)
    if rotation_matrix is not None:
        assert torch.isfinite(ChannelScaling(rotation_matrix).inverse).all()
    for role in ("keys", "values"):
        codec = fitted(8, states, None, role)
        decoded = torch.empty_like(states)
        codec.decode(codec.encode(states), decoded)
        assert (decoded - states).abs().max() <= 0.05 * states.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("dim", [64, 80, 24])
def test_balanced_records_are_those_of_scaled_states_without_balance(role: str, dim: int, dtype: torch.dtype):
    """An accelerator scales and undoes it by operations of torch, with other rounding errors."""
    given = torch.randn(2, 3, 192, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    scaling = random_factors(3, dim, 1) if role == "keys" else random_rotation_matrix(3, dim, 1)
    codec, plain = (MinMaxCodec(8, 64, role == "keys", channel_scaling=each) for each in (scaling, None))
    decoded, through = torch.empty_like(given), torch.empty(given.shape)
    codec.decode(codec.encode(given), decoded)
    plain.decode(plain.encode(scaling.applied(given)), through)
    torch.testing.assert_close(decoded, scaling.undone(through).to(dtype), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(decoded, given, rtol=0.05, atol=0.4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3), r"Weights must be float32 \[num_kv_heads, head_dim\]"),
        (torch.ones(1, 3, 4), r"got torch.float32 \[1, 3, 4\]"),
        (torch.ones(1, 4, dtype=torch.float64), "got torch.float64"),
        (torch.tensor([[1.0, 0.0]]), "no inverse"),
        (torch.tensor([[1.0, math.nan]]), "no inverse"),
        (torch.ones(1, 2, 2), "no inverse"),
    ],
)
def test_weights_that_cannot_be_undone_are_refused(weights: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        ChannelScaling(weights)


def test_equal_weights_make_equal_codecs():
    codecs = [MinMaxCodec(4, 64, True, channel_scaling=random_factors(2, 16, seed)) for seed in (0, 0, 1)]
    assert codecs[0] == codecs[1] != codecs[2]
    assert hash(codecs[0]) == hash(codecs[1])
