"""Sums of the outputs of gated experts by one call, against float64."""

from typing import NamedTuple

import numpy as np
import pytest

from hf_hybrid_cache.kernels import ExpertCall, Products, add_up_experts
from kernels.test_panels import random_numbers
from kernels.test_products import COUNT, Weights, choices, every_number_of_threads, weights

# Hidden and gated columns; those of a vector, of a row's step and of a group are straddled.
SHAPES = [(1, 1), (16, 16), (33, 17), (100, 50), (96, 130), (256, 96)]
# Tokens and their choices; the last ones are more than a thread gates at a time.
TOKENS = [(1, 1), (1, 4), (3, 2), (40, 6)]


class Experts(NamedTuple):
    """The weights of gated experts: those of gates and what is gated, and those of the way back."""

    up: Weights
    down: Weights

    def add_up(self, call: ExpertCall) -> int:
        return add_up_experts(self.up.products, self.down.products, call)


def experts(kind: str, hidden: int, gated: int, storage: str = "float32") -> Experts:
    return Experts(weights(kind, 2 * gated, hidden, storage), weights(kind, hidden, gated, storage, seed=1))


class Given(NamedTuple):
    """The inputs of experts, also in float64."""

    tokens: np.ndarray
    chosen: np.ndarray
    router_weights: np.ndarray
    up_bias: np.ndarray | None
    down_bias: np.ndarray | None
    exact: tuple[np.ndarray | None, ...]


def given(
    hidden: int, gated: int, tokens: int = 3, of_token: int = 2, storage: str = "float32", has_bias: bool = False
) -> Given:
    numbers = [
        random_numbers(tokens, hidden, storage=storage, seed=2),
        random_numbers(tokens, of_token, storage=storage, seed=3),
        random_numbers(COUNT, 2 * gated, storage=storage, seed=4) if has_bias else (None, None),
        random_numbers(COUNT, hidden, storage=storage, seed=5) if has_bias else (None, None),
    ]
    states, router_weights, up_bias, down_bias = (each for each, _ in numbers)
    return Given(
        states, choices(tokens, of_token), router_weights, up_bias, down_bias, tuple(exact for _, exact in numbers)
    )


def run(experts: Experts, given: Given, wrong: int = 0) -> np.ndarray:
    out = np.full((len(given.tokens), given.tokens.shape[1]), 7, np.float32)
    chosen = np.ascontiguousarray(given.chosen, np.int64)
    up_bias, down_bias = (0 if each is None else each.ctypes.data for each in (given.up_bias, given.down_bias))
    call = ExpertCall(
        chosen=chosen.ctypes.data,
        num_pairs=chosen.size,
        tokens=given.tokens.ctypes.data,
        choices=chosen.shape[1],
        is_bfloat16=given.tokens.dtype == np.uint16,
        router_weights=given.router_weights.ctypes.data,
        has_bfloat16_router_weights=given.router_weights.dtype == np.uint16,
        up_bias=up_bias,
        down_bias=down_bias,
        out=out.ctypes.data,
    )
    assert experts.add_up(call) == wrong
    return out


def expected(experts: Experts, given: Given) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums, and their largest possible values if nothing cancelled out."""
    tokens, router_weights, up_bias, down_bias = given.exact
    assert tokens is not None
    assert router_weights is not None
    sums, sizes = np.zeros_like(tokens), np.zeros_like(tokens)
    for token, choices_of_token in enumerate(given.chosen):
        for index, router_weight in zip(choices_of_token, router_weights[token], strict=True):
            if not 0 <= index < COUNT:
                continue
            up, down = experts.up.exact[index], experts.down.exact[index]
            states = up @ tokens[token] + (0 if up_bias is None else up_bias[index])
            largest = np.abs(up) @ np.abs(tokens[token]) + (0 if up_bias is None else np.abs(up_bias[index]))
            gate, linear = np.split(states, 2)
            with np.errstate(over="ignore"):
                result = down @ (gate / (1 + np.exp(-gate)) * linear)
            size = np.abs(down) @ np.prod(np.split(largest, 2), axis=0)
            if down_bias is not None:
                result, size = result + down_bias[index], size + np.abs(down_bias[index])
            sums[token] += router_weight * result
            sizes[token] += np.abs(router_weight) * size
    return sums, sizes


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["rows", "columns", "8", "4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("tokens", "of_token"), TOKENS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_sums_of_experts_are_those_in_float64(kind, shape, tokens, of_token, storage, has_bias):
    """Quantized experts compute with their decoded weights."""
    some, asked = experts(kind, *shape, storage), given(*shape, tokens, of_token, storage, has_bias)
    sums, sizes = expected(some, asked)
    # With codes, tokens, and what is gated, are rounded to 16 bits of the largest in their group.
    most = 3e-6 * sizes if kind in ("rows", "columns") else 1e-4 * sizes + 1e-6
    assert (np.abs(run(some, asked) - sums) <= most).all()


@pytest.mark.parametrize("kind", ["rows", "4"])
def test_many_numbers_are_shared_out_to_the_same_sums(kind):
    some, asked = experts(kind, 320, 96, "bfloat16"), given(320, 96, 400, 3, "bfloat16")
    together = run(some, asked)
    sums, sizes = expected(some, asked)
    assert (np.abs(together - sums) <= 1e-4 * sizes).all()
    for _ in every_number_of_threads():
        alone = []
        for part in (slice(0, 1), slice(1, 9), slice(9, 400)):
            of_part = [each[part] for each in (asked.tokens, asked.chosen, asked.router_weights)]
            alone.append(run(some, asked._replace(**dict(zip(Given._fields, of_part, strict=False)))))
        assert (np.concatenate(alone) == together).all()


@pytest.mark.parametrize("gate", [0.0, -1e-30, 20.0, -20.0, 100.0, -100.0, 3e4, -3e4, np.inf, np.nan])
def test_the_gate_is_a_silu_at_every_size(gate):
    up = np.zeros((COUNT, 34, 1), np.float32)
    up[:, :17], up[:, 17:] = gate, 1
    down = np.ones((COUNT, 1, 17), np.float32)
    some = Experts(
        *(Weights(Products.of_numbers(w.ctypes.data, *w.shape, is_bfloat16=False), w, w) for w in (up, down))
    )
    asked = given(1, 17, 1, 1)._replace(
        tokens=np.ones((1, 1), np.float32), chosen=np.array([[0]]), router_weights=np.ones((1, 1), np.float32)
    )
    out = run(some, asked)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = 17 * np.float64(gate) / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(out[0, 0], exact, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("index", [-1, COUNT + 1, 2**40])
def test_indices_of_no_expert_are_counted_and_add_nothing(index):
    some, asked = experts("rows", 40, 20), given(40, 20)
    asked = asked._replace(chosen=np.array([[0, index], [index, index], [1, 2]]))
    out = run(some, asked, wrong=3)
    sums, sizes = expected(some, asked)
    assert (np.abs(out - sums) <= 3e-6 * sizes).all()
    assert (out[1] == 0).all()


def test_what_is_not_finite_in_an_expert_reaches_only_those_who_chose_it():
    up, down = weights.__wrapped__("rows", 40, 40), weights("rows", 40, 20)
    up.kept[3, 39, 5] = np.nan
    out = run(Experts(up, down), given(40, 20)._replace(chosen=np.array([[0, 1], [2, 3], [4, 5]])))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()
