"""Torch's attention with the sums of its rows, and the plain way, against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from kernels.reference import Case, as_torch_mask, attention

from hf_hybrid_cache.attention import torch_attention
from hf_hybrid_cache.attention.torch_attention import attend_by_torch, attend_plainly

BATCH, HEADS, ROWS = 2, 3, 5
# Of outputs relative to the largest value, and of the log-sum-exp.
BOUNDS = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
ATTEND = pytest.mark.parametrize("attend", [attend_by_torch, attend_plainly])


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_PLAIN_TOKENS", 64)


def masks(tokens: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Make masks for the reference; a row of random ones sees nothing."""
    generator = np.random.default_rng(1)
    random = generator.random((BATCH, HEADS, ROWS, tokens)) < 0.5
    random[0, 1, 2] = False
    bias = torch.from_numpy(np.where(random[:1], generator.standard_normal(random[:1].shape), -np.inf)).to(dtype)
    return {
        "none": {},
        "causal": {"causal": True},
        "padded": {"visible": np.tile(np.arange(tokens) >= tokens // 2, (BATCH, 1, 1, 1))},
        "random": {"visible": random},
        "added": {"bias": bias.float().numpy()},
    }


def check(
    attend,
    dtype: torch.dtype,
    dims: tuple[int, int],
    mask: str,
    tokens: int,
    scale: float | None,
    bounds: tuple[float, float],
    device: str = "cpu",
    is_token_major: bool = False,
):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(BATCH, HEADS, number, dim, generator=generator).to(device, dtype)
        for number, dim in ((ROWS, dims[0]), (tokens, dims[0]), (tokens, dims[1]))
    )
    case = Case(*(states.double().cpu().numpy() for states in (query, keys, values)))
    if is_token_major:  # the layout of slots of streamed layers
        keys, values = (states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for states in (keys, values))
    given = masks(tokens, dtype)[mask]
    seen = as_torch_mask(case, dtype, **given)
    out, lse = attend(query, keys, values, None if seen is None else seen.to(device), scale)
    expected, expected_lse = attention(case, scale or dims[0] ** -0.5, **given)
    np.testing.assert_allclose(out.double().cpu(), expected, rtol=0, atol=bounds[0] * np.abs(case.values).max())
    np.testing.assert_allclose(lse.double().cpu(), expected_lse, rtol=0, atol=bounds[1])


@pytest.mark.default("pairs")
@ATTEND
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (7, 7)], ids=str)
@pytest.mark.parametrize("mask", masks(5, torch.float32))
@pytest.mark.parametrize("tokens", [5, 63, 64, 65, 200])
def test_out_and_log_sums_are_those_of_float64(attend, dtype: torch.dtype, dims, mask: str, tokens: int):
    check(attend, dtype, dims, mask, tokens, 0.3, BOUNDS[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (60, 60), (256, 256), (24, 16)], ids=str)
@pytest.mark.parametrize("mask", ["none", "padded", "random"])
@pytest.mark.parametrize("is_token_major", [False, True])
def test_on_cuda_out_and_log_sums_are_those_of_float64(dtype: torch.dtype, dims, mask: str, is_token_major: bool):
    check(attend_by_torch, dtype, dims, mask, 1000, None, (5e-3, 1e-2), "cuda", is_token_major)


@ATTEND
def test_hidden_numbers_when_not_finite_then_result_is_not_plausible(attend):
    query, keys, values = (torch.randn(1, 1, n, 8) for n in (2, 70, 70))
    values[0, 0, 3] = torch.inf
    mask = torch.ones(1, 1, 2, 70, dtype=torch.bool)
    mask[..., :64] = False
    out, _ = attend(query, keys, values, mask, None)
    assert not out.isfinite().any()
