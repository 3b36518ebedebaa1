"""Attention to parts of a sequence, merged, is attention to all of it."""

import itertools

import pytest
import torch

from hf_hybrid_cache.attention.merging import Found, MergedAttention, merged_at_once


@pytest.mark.parametrize("cuts", [[], [1], [63, 64], [10, 10, 40], [0, 70]])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_parts_in_any_order_give_what_float64_gives_for_all(cuts: list[int], spread: float):
    torch.manual_seed(0)
    scores = spread * torch.randn(2, 3, 5, 70, dtype=torch.float64)
    scores[0, 1, 2, 5:] = -torch.inf  # all but the first tokens are not seen by this row
    scores[1, 0, :, 64:] = -torch.inf
    values = torch.randn(2, 3, 70, 8, dtype=torch.float64)
    expected = scores.softmax(-1) @ values
    bounds = [0, *cuts, 70]
    parts = [range(*pair) for pair in itertools.pairwise(bounds)]
    for order in (parts, parts[::-1]):
        merged = MergedAttention()
        found = []
        for part in order:
            of_part = scores[..., part.start : part.stop]
            weights = of_part.softmax(-1).nan_to_num(0)  # where a part has no token that is seen
            out = weights @ values[:, :, part.start : part.stop]
            found.append((out.float(), of_part.logsumexp(-1).float()))
            merged.add(Found(*(each.clone() for each in found[-1])))  # it adds up in place
        at_once = merged_at_once(*(torch.stack(each) for each in zip(*found, strict=True)))
        for result in (merged.found, at_once):
            torch.testing.assert_close(result.out.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(result.log_sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_where_no_part_has_a_token_that_is_seen_nothing_comes_out():
    merged = MergedAttention()
    for _ in range(3):
        merged.add(Found(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf)))
    at_once = merged_at_once(torch.zeros(3, 1, 1, 2, 4), torch.full((3, 1, 1, 2), -torch.inf))
    for result in (merged.found, at_once):
        assert torch.equal(result.out, torch.zeros(1, 1, 2, 4))
        assert torch.equal(result.log_sums, torch.full((1, 1, 2), -torch.inf))


def test_what_is_not_a_number_stays_so():
    outs, log_sums = torch.zeros(2, 1, 1, 2, 4), torch.zeros(2, 1, 1, 2)
    outs[1, 0, 0, 1], log_sums[1, 0, 0, 1] = torch.nan, torch.nan
    merged = MergedAttention()
    for out, sums in zip(outs, log_sums, strict=True):
        merged.add(Found(out, sums))
    for result in (merged.found.out, merged_at_once(outs, log_sums).out):
        assert torch.equal(result[0, 0, 0], torch.zeros(4))
        assert result[0, 0, 1].isnan().all()
