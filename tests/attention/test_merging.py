"""Attention to parts of a sequence, merged, is attention to all of it."""

import itertools

import pytest
import torch

from hf_hybrid_cache.attention.torch_attention import PartialAttention, merged, merged_at_once


@pytest.mark.parametrize("cuts", [[], [1], [63, 64], [10, 10, 40], [0, 70]])
def test_parts_in_any_order_give_what_float64_gives_for_all(cuts: list[int]):
    torch.manual_seed(0)
    scores, values = 30 * torch.randn(2, 3, 5, 70, dtype=torch.float64), torch.randn(2, 3, 70, 8, dtype=torch.float64)
    scores[0, 1, 2, 5:] = -torch.inf  # all but the first tokens are not seen by this row
    scores[1, 0, :, 64:] = -torch.inf
    scores[1, 2, 3] = -torch.inf  # a row that sees none
    expected = scores.softmax(-1).nan_to_num(0) @ values
    one_by_one, parts = None, []
    ends = list(itertools.pairwise([0, *cuts, 70]))
    for part in itertools.starmap(slice, ends[1:] + ends[:1]):
        out = scores[..., part].softmax(-1).nan_to_num(0) @ values[:, :, part]
        parts.append(PartialAttention(out.float(), scores[..., part].logsumexp(-1).float()))
        one_by_one = merged(one_by_one, parts[-1])
    at_once = merged_at_once(*(torch.stack(each) for each in zip(*parts, strict=True)))
    for result in (one_by_one, at_once):
        torch.testing.assert_close(result.out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result.lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_merging_when_a_part_is_nan_then_result_is_nan():
    outs, lse = torch.zeros(2, 1, 1, 2, 4), torch.zeros(2, 1, 1, 2)
    outs[1, 0, 0, 1], lse[1, 0, 0, 1] = torch.nan, torch.nan
    one_by_one = merged(*(PartialAttention(*each) for each in zip(outs, lse, strict=True)))
    for result in (one_by_one.out, merged_at_once(outs, lse).out):
        assert torch.equal(result[0, 0, 0], torch.zeros(4))
        assert result[0, 0, 1].isnan().all()
