"""Torch's attention with the sums of its rows, and the plain way, against float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from kernels.reference import Case, as_torch_mask, attention, random_masks

from hf_hybrid_cache.attention import torch_attention
from hf_hybrid_cache.attention.queries import Queries
from hf_hybrid_cache.attention.torch_attention import attend_by_torch, attend_plainly

from common.soak import search_at_random

ROWS = 5
# Of outputs relative to the largest value, and of the log-sum-exp.
BOUNDS = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
ATTEND = pytest.mark.parametrize("attend", [attend_by_torch, attend_plainly])


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_PLAIN_TOKENS", 64)


def check(
    data: st.DataObject,
    attend,
    dtype: torch.dtype,
    dims: tuple[int, int],
    tokens: int,
    scale: float | None,
    bounds: tuple[float, float],
    device: str = "cpu",
):
    """Attend with random masks, to states in the layout of slots of streamed layers, or not."""
    draw, generator = data.draw, torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, 3, number, dim, generator=generator).to(device, dtype)
        for number, dim in ((ROWS, dims[0]), (tokens, dims[0]), (tokens, dims[1]))
    )
    case = Case(*(states.double().cpu().numpy() for states in (query, keys, values)))
    if draw(st.booleans()):
        keys, values = (states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for states in (keys, values))
    masks = random_masks(draw, case, 1, dtype)
    seen = as_torch_mask(case, dtype, **masks)
    out, lse = attend(Queries(query, 1, scale, None if seen is None else seen.to(device)), keys, values)
    expected, expected_lse = attention(case, scale or dims[0] ** -0.5, **masks)
    np.testing.assert_allclose(out.double().cpu(), expected, rtol=0, atol=bounds[0] * np.abs(case.values).max())
    np.testing.assert_allclose(lse.double().cpu(), expected_lse, rtol=0, atol=bounds[1])


@ATTEND
@search_at_random(50)
@given(data=st.data())
def test_out_and_log_sums_are_those_of_float64(attend, data: st.DataObject):
    dtype, dims = data.draw(st.sampled_from(list(BOUNDS))), data.draw(st.sampled_from([(16, 16), (24, 16), (7, 7)]))
    tokens = data.draw(st.sampled_from([63, 64, 65]) | st.integers(ROWS, 200))
    check(data, attend, dtype, dims, tokens, 0.3, BOUNDS[dtype])


@pytest.mark.cuda
@search_at_random(50)
@given(data=st.data())
def test_on_cuda_out_and_log_sums_are_those_of_float64(data: st.DataObject):
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    dims = data.draw(st.sampled_from([(64, 64), (60, 60), (256, 256), (24, 16)]))
    check(data, attend_by_torch, dtype, dims, 1000, None, (5e-3, 1e-2), "cuda")


@ATTEND
def test_hidden_numbers_when_not_finite_then_result_is_not_plausible(attend):
    query, keys, values = (torch.randn(1, 1, n, 8) for n in (2, 70, 70))
    values[0, 0, 3] = torch.inf
    mask = torch.ones(1, 1, 2, 70, dtype=torch.bool)
    mask[..., :64] = False
    out, _ = attend(Queries(query, 1, None, mask), keys, values)
    assert not out.isfinite().any()
