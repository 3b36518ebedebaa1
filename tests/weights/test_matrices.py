"""Products of tokens with matrices in host memory, quantized or not, and the sums of experts, against float64."""

import itertools
from collections.abc import Iterator
from functools import lru_cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional

from hf_hybrid_cache.kernels import get_num_threads, set_num_threads, uses_gemm
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.weights import quantized_matrices
from hf_hybrid_cache.weights.matrices import Matrices, PlainMatrices
from hf_hybrid_cache.weights.quantized_matrices import MOST_TOKENS, QuantizedMatrices

from common.soak import count, search_at_random

# So many matrices; the columns that many tokens are rounded by; the largest number of tokens that are rounded to 16
# bits, as those that choose matrices are, and not to 8.
COUNT, STRIP, FINE_TOKENS = 6, 32, 32
# Ids of no matrix; the first is the one that means none.
NONE, *WRONG = COUNT, -1, COUNT + 1, 2**40
PLAIN = "rows"
QUANTIZED = {"8 bits": 8, "4 bits": 4}
GROUPS = st.sampled_from([32, 64, 128])
# What a result in a type is off by, relative to itself.
DTYPES = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
EVERY_DTYPE = st.sampled_from(list(DTYPES))
# Plain matrices of other dtypes have no kernel.
KINDS = st.tuples(st.just(PLAIN), st.sampled_from([torch.float32, torch.bfloat16])) | st.tuples(
    st.sampled_from([*QUANTIZED]), EVERY_DTYPE
)
SIZES = st.integers(1, 140)
# Around panels of 16 rows, and groups of columns.
SHAPES = st.sampled_from([(1, 1), (16, 32), (17, 33), (48, 64), (130, 200)]) | st.tuples(SIZES, SIZES)


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=32)
def made(
    kind: str, rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0, group: int = STRIP
) -> tuple[Matrices, torch.Tensor]:
    """Return random matrices, each twice as large as the one before, and their numbers in float64."""
    weights = (random_numbers(COUNT, rows, columns, seed=seed) * 2.0 ** torch.arange(COUNT)[:, None, None]).to(dtype)
    if kind == PLAIN:
        return PlainMatrices(weights), weights.double()
    codes = QuantizedMatrices(weights, QUANTIZED[kind], group)
    return codes, torch.stack([codes.dense(index, torch.float32) for index in range(COUNT)]).double()


def every_number_of_threads() -> Iterator[int]:
    for threads in range(1, get_num_threads() + 1):
        set_num_threads(threads)
        try:
            yield threads
        finally:
            set_num_threads(None)


@st.composite
def choices(draw: st.DrawFn, num_tokens: int) -> torch.Tensor:
    """Different matrices for each token; the last choices may be none, or wrong."""
    generator, of_token = torch.Generator().manual_seed(draw(st.integers(0, 99))), draw(st.integers(1, COUNT))
    chosen = torch.stack([torch.randperm(COUNT, generator=generator)[:of_token] for _ in range(num_tokens)])
    others = draw(st.lists(st.just(NONE) | st.sampled_from([NONE, *WRONG]), max_size=2))[: chosen.numel()]
    chosen.view(-1)[chosen.numel() - len(others) :] = torch.tensor(others, dtype=torch.int64)
    return chosen


def num_wrong(chosen: torch.Tensor) -> int:
    return int(torch.isin(chosen, torch.tensor(WRONG)).sum())


def rounding(tokens: torch.Tensor, group: int, to_8_bits: bool) -> torch.Tensor:
    """Return the largest rounding error of each number of float64 `tokens`, `[tokens, columns]`."""
    size = STRIP if to_8_bits else group
    groups = functional.pad(tokens, (0, -tokens.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(2)
    steps = largest / 65278
    if to_8_bits:
        steps = 0.501 * torch.maximum((groups.amax(2) - groups.amin(2)) / 254, largest / 2**15)
    return steps.repeat_interleave(size, 1)[:, : tokens.shape[1]]


def require_close(
    ours: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor, errors: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Check that products are off by `errors` of tokens, and by the rounding of results, alone."""
    exact_tokens, is_finite = tokens.double(), tokens.isfinite().all(1)
    assert not ours[~is_finite].isfinite().any()
    added = torch.zeros(len(matrix)) if bias is None else bias.double()
    exact = (exact_tokens @ matrix.T + added)[is_finite]
    # The last term is so small that no model computes with it.
    most = (errors + 1e-5 * exact_tokens.abs())[is_finite] @ matrix.abs().T + 1e-5 * added.abs() + 1e-27
    most += DTYPES[tokens.dtype] * exact.abs() + (6e-8 if tokens.dtype == torch.float16 else 0)
    assert ((ours[is_finite].double() - exact).abs() <= most).all()


@pytest.mark.soak
@search_at_random(40)
@given(data=st.data())
def test_products_when_all_is_random_then_are_those_with_the_codes(data: st.DataObject):
    """Threads and other tokens change nothing. What is not finite, or huge, costs its own token and group alone."""
    draw, dtype, group = data.draw, data.draw(EVERY_DTYPE), data.draw(GROUPS)
    kind, is_long = draw(st.sampled_from(list(QUANTIZED))), draw(st.integers(0, 15)) == 0
    # Four hundred tokens of so many columns are several blocks.
    rows, columns = draw(st.sampled_from([(20, 8192), (70, 1025)]) if is_long else SHAPES)
    num_tokens = 400 if is_long else draw(st.sampled_from([1, 2, 3, 5, 6, 8, 9, 21, FINE_TOKENS + 1, MOST_TOKENS + 1]))
    matrices, exact = made(kind, rows, columns, dtype, group=group)
    is_exact = draw(st.booleans())
    by_gemm = not is_exact and num_tokens > FINE_TOKENS and uses_gemm(QUANTIZED[kind], dtype == torch.bfloat16)
    by_torch = not by_gemm and num_tokens > MOST_TOKENS
    numbers = random_numbers(num_tokens, columns, seed=draw(st.integers(0, 99)))
    if dtype != torch.float16:  # which would overflow
        numbers += draw(st.sampled_from([0, 3, -1000]))
        numbers *= draw(st.just(1.0) | st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e28]))
        if draw(st.booleans()):
            far = draw(st.sampled_from([1e4, 1e30, torch.nan, -torch.inf]))
            numbers[draw(st.integers(0, num_tokens - 1)), draw(st.integers(0, columns - 1))] = far
    errors = None
    if by_gemm and columns % STRIP == 0 and draw(st.booleans()):
        # Multiples of the step in each strip are not rounded.
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        steps = torch.randint(0, 255, (num_tokens, columns // STRIP, STRIP), generator=generator)
        steps[:, :, :2] = torch.tensor([0, 254])
        zeros = torch.randint(0, 255, (num_tokens, 1), generator=generator)
        numbers, errors = (steps.flatten(1) - zeros).float(), torch.zeros(1)
    tokens = numbers.to(dtype)
    bias = random_numbers(rows).to(dtype) if draw(st.booleans()) else None
    index = draw(st.integers(0, COUNT - 1))
    if errors is None:
        errors = rounding(tokens.double(), group, by_gemm)
    if by_torch:  # which rounds the numbers of matrices, too
        errors = tokens.double().abs() * DTYPES[torch.bfloat16 if dtype == torch.bfloat16 else torch.float32]
    first = draw(st.integers(0, num_tokens - 1)) if num_tokens <= FINE_TOKENS else 0
    some = slice(first, draw(st.integers(first + 1 if first else min(num_tokens, FINE_TOKENS + 1), num_tokens)))
    set_integer_kernels(False if is_exact else None)
    try:
        ours = matrices.multiply(tokens, index, bias)
        require_close(ours, tokens, exact[index], errors, bias)
        for _ in every_number_of_threads() if not by_torch else ():
            alone = matrices.multiply(tokens[some], index, bias)
            torch.testing.assert_close(alone, ours[some], rtol=0, atol=0, equal_nan=True)
    finally:
        set_integer_kernels(None)
    count("products compared with float64")


@pytest.mark.skipif(not uses_gemm(4, False), reason="the processor does not add up four products of 8 bits")
def test_many_tokens_are_rounded_to_8_bits_unless_products_shall_be_exact(request: pytest.FixtureRequest):
    (matrices, exact), tokens = made("4 bits", 130, 200), random_numbers(MOST_TOKENS + 1, 200)
    products = tokens.double() @ exact[0].T
    assert (matrices.multiply(tokens).double() - products).norm() > 2e-3 * products.norm()
    request.getfixturevalue("exact_kernels")
    assert (matrices.multiply(tokens).double() - products).norm() < 1e-5 * products.norm()


def test_without_bfloat16_instructions_many_tokens_go_to_float32(exact_kernels: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_matrices, "has_fast_bfloat16", lambda: False)
    (matrices, _), tokens = made("8 bits", 130, 200), random_numbers(MOST_TOKENS + 1, 200).bfloat16()
    assert torch.equal(matrices.multiply(tokens), matrices.multiply(tokens.float()).bfloat16())


@pytest.mark.soak
@search_at_random(40)
@given(data=st.data())
def test_products_with_chosen_matrices_are_those_in_float64(data: st.DataObject):
    """Wrong indices are refused. Neither threads nor other tokens change a product."""
    draw, (kind, dtype), group = data.draw, data.draw(KINDS), data.draw(GROUPS)
    num_tokens = draw(st.sampled_from([1, 2, 3, 9, 40]))
    rows, columns = draw(st.sampled_from([(40, 2048), (1100, 70)]) if draw(st.integers(0, 7)) == 0 else SHAPES)
    matrices, exact = made(kind, rows, columns, dtype, group=group)
    chosen = draw(choices(num_tokens))
    of_each = chosen.shape[1] if draw(st.booleans()) else 1  # each choice has a token of its own, or not
    tokens = random_numbers(num_tokens * of_each, columns, seed=2).to(dtype)
    bias = random_numbers(COUNT, rows, seed=3).to(dtype) if draw(st.booleans()) else None
    if wrong := num_wrong(chosen):
        with pytest.raises(IndexError, match=f"^{wrong} of {chosen.numel()} indices are of no matrix: there are 6"):
            matrices.multiply_chosen(tokens, chosen, bias)
        return
    ours = matrices.multiply_chosen(tokens, chosen, bias)
    flat, of_pairs = chosen.flatten(), tokens.repeat_interleave(chosen.shape[1] // of_each, 0)
    assert not ours[flat == NONE].any()
    for index in range(COUNT):
        of_index = of_pairs[flat == index]
        errors = torch.zeros(1) if kind == PLAIN else rounding(of_index.double(), group, False)
        require_close(ours[flat == index], of_index, exact[index], errors, None if bias is None else bias[index])
    last = slice(draw(st.integers(0, num_tokens - 1)), None)
    for _ in every_number_of_threads():
        alone = matrices.multiply_chosen(tokens[last.start * of_each :], chosen[last], bias)
        assert torch.equal(alone, ours[last.start * chosen.shape[1] :])
    count("products compared with float64")


def test_what_is_not_finite_in_a_matrix_reaches_only_those_who_chose_it():
    for bad in (torch.nan, torch.inf):
        weights = random_numbers(COUNT, 40, 40)
        weights[3, 39, 5] = bad
        matrices, chosen = PlainMatrices(weights), torch.tensor([[0, 1], [2, 3], [4, 5]])
        products = matrices.multiply_chosen(random_numbers(3, 40), chosen).isfinite()
        assert (~products).nonzero().tolist() == [[3, 39]]
        down = PlainMatrices(random_numbers(COUNT, 40, 20))
        sums = matrices.add_up_experts(down, random_numbers(3, 40), chosen, torch.ones(3, 2), None, None)
        assert sums.isfinite().all(1).tolist() == [True, False, True]
        assert not sums[1].isfinite().any()


# Hidden and gated columns straddle those of a vector, of a row's step and of a group. Forty tokens and their choices
# are more than a thread gates at a time; four hundred are shared out.
@pytest.mark.soak
@search_at_random(30)
@given(data=st.data())
def test_sums_of_experts_when_random_then_are_those_in_float64(data: st.DataObject):
    """Quantized experts compute with their decoded weights. Sums depend neither on threads nor on other tokens."""
    draw, (kind, dtype), is_long = data.draw, data.draw(KINDS), data.draw(st.integers(0, 15)) == 0
    shapes = st.sampled_from([(1, 1), (16, 16), (33, 17), (96, 130), (256, 96)]) | st.tuples(SIZES, SIZES)
    hidden, gated = (320, 96) if is_long else draw(shapes)
    (up, exact_up), (down, exact_down) = made(kind, 2 * gated, hidden, dtype), made(kind, hidden, gated, dtype, seed=1)
    chosen = draw(choices(400 if is_long else draw(st.sampled_from([1, 3, 40]))))
    tokens, router_weights = (
        random_numbers(len(chosen), hidden, seed=2).to(dtype),
        random_numbers(*chosen.shape, seed=3),
    )
    router_weights = router_weights.to(draw(EVERY_DTYPE))
    biases = [random_numbers(COUNT, size, seed=size).to(dtype) for size in (2 * gated, hidden)]
    biases = biases if draw(st.booleans()) else [None, None]

    def added_up(of: slice) -> torch.Tensor:
        return up.add_up_experts(down, tokens[of], chosen[of], router_weights[of], *biases)

    if wrong := num_wrong(chosen):
        with pytest.raises(IndexError, match=f"^{wrong} of {chosen.numel()} indices are of no matrix: there are 6"):
            added_up(slice(None))
        return
    ours = added_up(slice(None))
    # The sums, and their largest possible values if nothing cancelled out.
    exact, sizes = torch.zeros(2, *tokens.shape, dtype=torch.float64)
    up_bias, down_bias = ([torch.zeros(1)] * COUNT if each is None else each.double() for each in biases)
    for index in range(COUNT):
        token, choice = (chosen == index).nonzero(as_tuple=True)
        given, factors = tokens[token].double(), router_weights[token, choice].double()[:, None]
        gate, linear = (given @ exact_up[index].T + up_bias[index]).chunk(2, dim=1)
        largest = (given.abs() @ exact_up[index].abs().T + up_bias[index].abs()).chunk(2, dim=1)
        result = (functional.silu(gate) * linear) @ exact_down[index].T + down_bias[index]
        size = (largest[0] * largest[1]) @ exact_down[index].abs().T + down_bias[index].abs()
        exact.index_add_(0, token, factors * result)
        sizes.index_add_(0, token, factors.abs() * size)
    # Tokens, and then gated numbers, are rounded to 16 bits of the largest number in a group.
    assert ((ours - exact).abs() <= (3e-6 * sizes if kind == PLAIN else 1e-4 * sizes + 1e-6)).all()
    cuts = sorted({0, 1, min(9, len(tokens)), len(tokens)})
    for _ in every_number_of_threads():
        alone = [added_up(slice(start, end)) for start, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(alone), ours)
    count("sums of experts compared with float64")


def test_the_gate_is_a_silu_at_every_size():
    gates = torch.tensor([0.0, -1e-30, 20.0, -20.0, 100.0, -100.0, 3e4, -3e4, torch.inf, torch.nan])[:, None]
    up, down = PlainMatrices(torch.ones(1, 34, 1)), PlainMatrices(torch.ones(1, 1, 17))
    chosen, ones = torch.zeros(len(gates), 1, dtype=torch.int64), torch.ones(len(gates), 1)
    sums = up.add_up_experts(down, gates, chosen, ones, None, None)
    exact = 17 * functional.silu(gates.double()) * gates
    torch.testing.assert_close(sums.double(), exact, rtol=1e-6, atol=1e-35, equal_nan=True)
