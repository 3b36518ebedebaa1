"""Torch's attention with the sums of its rows, and the plain way, against float64."""

import pytest
import torch

from hf_hybrid_cache.attention import torch_attention
from hf_hybrid_cache.attention.torch_attention import attend_by_torch, attend_plainly

BATCH, HEADS, ROWS = 2, 3, 5
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_PLAIN_TOKENS", 64)


def masks(tokens: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    random = torch.rand(BATCH, HEADS, ROWS, tokens, generator=generator) < 0.5
    random[0, 1, 2] = False  # a row that sees nothing
    return {
        "none": None,
        "causal": torch.ones(ROWS, tokens, dtype=torch.bool).tril(tokens - ROWS)[None, None],
        "padded": (torch.arange(tokens) >= tokens // 2)[None, None, None].expand(BATCH, 1, 1, -1),
        "random": random,
        "added": torch.randn(1, HEADS, ROWS, tokens, generator=generator).masked_fill(~random, -torch.inf),
    }


@pytest.mark.covering(2)
@pytest.mark.parametrize("attend", [attend_by_torch, attend_plainly])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (7, 7)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "padded", "random", "added"])
@pytest.mark.parametrize("tokens", [5, 63, 64, 65, 200])
def test_out_and_log_sums_are_those_of_float64(attend, dtype: torch.dtype, dims, mask: str, tokens: int):
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(BATCH, HEADS, n, dims[0], generator=generator).to(dtype) for n in (ROWS, tokens))
    values = torch.randn(BATCH, HEADS, tokens, dims[1], generator=generator).to(dtype)
    seen = masks(tokens)[mask]
    if seen is not None and seen.dtype != torch.bool:
        seen = seen.to(dtype)
    scores = query.double() @ keys.double().mT * 0.3
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.double()
    out, lse = attend(query, keys, values, seen, 0.3)
    expected = scores.softmax(-1).nan_to_num(0) @ values.double()
    atol = BOUNDS[dtype] * float(values.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=max(1e-5, BOUNDS[dtype]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (60, 60), (256, 256), (24, 16)], ids=str)
@pytest.mark.parametrize("mask", ["none", "padded", "random"])
@pytest.mark.parametrize("is_token_major", [False, True])
def test_on_cuda_out_and_log_sums_are_those_of_float64(dtype: torch.dtype, dims, mask: str, is_token_major: bool):
    tokens = 1000
    query, keys = (torch.randn(BATCH, HEADS, n, dims[0], device="cuda").to(dtype) for n in (ROWS, tokens))
    values = torch.randn(BATCH, HEADS, tokens, dims[1], device="cuda").to(dtype)
    if is_token_major:  # the layout of slots of streamed layers
        keys, values = (states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for states in (keys, values))
    seen = masks(tokens)[mask]
    seen = None if seen is None else seen.cuda()
    scores = query.double() @ keys.double().mT * dims[0] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    out, lse = attend_by_torch(query, keys, values, seen, None)
    expected = scores.softmax(-1).nan_to_num(0) @ values.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-2)


@pytest.mark.parametrize("attend", [attend_by_torch, attend_plainly])
def test_hidden_numbers_when_not_finite_then_result_is_not_plausible(attend):
    query, keys, values = (torch.randn(1, 1, n, 8) for n in (2, 70, 70))
    values[0, 0, 3] = torch.inf
    mask = torch.ones(1, 1, 2, 70, dtype=torch.bool)
    mask[..., :64] = False
    out, _ = attend(query, keys, values, mask, None)
    assert not out.isfinite().any()
