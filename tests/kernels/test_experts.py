"""Sums of the outputs of gated experts by one call, against float64."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from hf_hybrid_cache.kernels import (
    ExpertCall,
    PanelLayout,
    Products,
    add_up_experts,
    factor_of,
    get_num_threads,
    quantize_panels,
    set_num_threads,
)
from kernels.test_chosen import COUNT, choices, random_numbers
from kernels.test_panels import taken_apart

# Hidden and gated columns; those of a vector, of a row's step and of a group are straddled.
SHAPES = [(1, 1), (16, 16), (33, 17), (100, 50), (96, 130), (256, 96)]
# Tokens and their choices; the last ones are more than a thread gates at a time.
TOKENS = [(1, 1), (1, 4), (3, 2), (40, 6)]
Kernel = Callable[[ExpertCall], int]


class Weights(NamedTuple):
    """The kernel of some experts, and their weights in float64."""

    kernel: Kernel
    up: np.ndarray
    down: np.ndarray
    kept: tuple[object, ...]


def plain(hidden: int, gated: int, storage: str, is_transposed: bool = False) -> Weights:
    up, exact_up = random_numbers(COUNT, 2 * gated, hidden, storage=storage)
    down, exact_down = random_numbers(COUNT, hidden, gated, storage=storage, seed=1)
    given, is_bfloat16 = [], storage == "bfloat16"
    for weights in (up, down):
        held = np.ascontiguousarray(weights.transpose(0, 2, 1)) if is_transposed else weights
        products = Products.of_numbers(held.ctypes.data, *weights.shape, is_bfloat16, is_transposed)
        given.append((products, held))
    (of_up, up), (of_down, down) = given
    return Weights(lambda call: add_up_experts(of_up, of_down, call), exact_up, exact_down, (up, down))


@cache
def quantized(hidden: int, gated: int, bits: int) -> Weights:
    products, exact, kept = [], [], []
    for seed, shape in enumerate(((2 * gated, hidden), (hidden, gated))):
        layout = PanelLayout(bits, *shape, 32)
        panels = np.empty((COUNT, layout.num_bytes), np.uint8)
        factors = [factor_of(4.0 * 2.0**index) for index in range(COUNT)]
        given, _ = random_numbers(COUNT, *shape, seed=seed)
        for index, factor in enumerate(factors):
            quantize_panels(given[index] * np.float32(2.0**index), layout, factor, panels[index])
        products.append(Products.of_panels(panels.ctypes.data, layout, factors))
        exact.append(np.array([taken_apart(panels[index], layout, factors[index])[0] for index in range(COUNT)]))
        kept.append(panels)
    up, down = products
    return Weights(lambda call: add_up_experts(up, down, call), *exact, (*kept, *products))


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


def run(kernel: Kernel, given: Given, wrong: int = 0) -> np.ndarray:
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
    assert kernel(call) == wrong
    return out


def expected(weights: Weights, given: Given) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums, and their largest possible values if nothing cancelled out."""
    tokens, router_weights, up_bias, down_bias = given.exact
    assert tokens is not None
    assert router_weights is not None
    sums, sizes = np.zeros_like(tokens), np.zeros_like(tokens)
    for token, choices_of_token in enumerate(given.chosen):
        for index, router_weight in zip(choices_of_token, router_weights[token], strict=True):
            if not 0 <= index < COUNT:
                continue
            up, down = weights.up[index], weights.down[index]
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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("tokens", "of_token"), TOKENS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
def test_sums_of_experts_are_those_in_float64(shape, tokens, of_token, storage, has_bias, is_transposed):
    weights, asked = plain(*shape, storage, is_transposed), given(*shape, tokens, of_token, storage, has_bias)
    sums, sizes = expected(weights, asked)
    assert (np.abs(run(weights.kernel, asked) - sums) <= 3e-6 * sizes).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("tokens", "of_token"), TOKENS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_coded_experts_are_those_of_the_decoded_ones(shape, tokens, of_token, storage, bits):
    weights, asked = quantized(*shape, bits), given(*shape, tokens, of_token, storage, has_bias=bits == 8)
    sums, sizes = expected(weights, asked)
    # Tokens, and what is gated, are rounded to 16 bits of the largest in their group.
    assert (np.abs(run(weights.kernel, asked) - sums) <= 1e-4 * sizes + 1e-6).all()


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_many_numbers_are_shared_out_to_the_same_sums(kind):
    shape = 320, 96
    weights = plain(*shape, "bfloat16") if kind == "plain" else quantized(*shape, 4)
    asked = given(*shape, 400, 3, "bfloat16")
    together = run(weights.kernel, asked)
    sums, sizes = expected(weights, asked)
    assert (np.abs(together - sums) <= 1e-4 * sizes).all()
    for threads in range(1, get_num_threads() + 1):
        set_num_threads(threads)
        try:
            alone = [
                run(
                    weights.kernel,
                    asked._replace(
                        tokens=asked.tokens[i:j], chosen=asked.chosen[i:j], router_weights=asked.router_weights[i:j]
                    ),
                )
                for i, j in ((0, 1), (1, 9), (9, 400))
            ]
        finally:
            set_num_threads(None)
        assert (np.concatenate(alone) == together).all()


@pytest.mark.parametrize("gate", [0.0, -1e-30, 20.0, -20.0, 100.0, -100.0, 3e4, -3e4, np.inf, np.nan])
def test_the_gate_is_a_silu_at_every_size(gate):
    up = np.zeros((COUNT, 34, 1), np.float32)
    up[:, :17], up[:, 17:] = gate, 1
    down = np.ones((COUNT, 1, 17), np.float32)
    weights = [Products.of_numbers(each.ctypes.data, *each.shape, is_bfloat16=False) for each in (up, down)]
    asked = given(1, 17, 1, 1)._replace(
        tokens=np.ones((1, 1), np.float32), chosen=np.array([[0]]), router_weights=np.ones((1, 1), np.float32)
    )
    out = run(lambda call: add_up_experts(*weights, call), asked)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = 17 * np.float64(gate) / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(out[0, 0], exact, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("index", [-1, COUNT + 1, 2**40])
def test_indices_of_no_expert_are_counted_and_add_nothing(index):
    weights, asked = plain(40, 20, "float32"), given(40, 20)
    asked = asked._replace(chosen=np.array([[0, index], [index, index], [1, 2]]))
    out = run(weights.kernel, asked, wrong=3)
    sums, sizes = expected(weights, asked)
    assert (np.abs(out - sums) <= 3e-6 * sizes).all()
    assert (out[1] == 0).all()


def test_what_is_not_finite_in_an_expert_reaches_only_those_who_chose_it():
    weights, asked = plain(40, 20, "float32"), given(40, 20)
    up, _ = weights.kept
    assert isinstance(up, np.ndarray)
    up[3, 39, 5] = np.nan
    out = run(weights.kernel, asked._replace(chosen=np.array([[0, 1], [2, 3], [4, 5]])))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()
