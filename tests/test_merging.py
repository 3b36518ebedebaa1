"""Attention to parts of a sequence, merged, is attention to all of it."""

import itertools

import pytest
import torch

from hf_hybrid_cache.attention.merging import MergedAttention


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
        for part in order:
            of_part = scores[..., part.start : part.stop]
            weights = of_part.softmax(-1).nan_to_num(0)  # where a part has no token that is seen
            out = weights @ values[:, :, part.start : part.stop]
            merged.add(out.float(), of_part.logsumexp(-1).float())
        torch.testing.assert_close(merged.out.double(), expected, rtol=1e-5, atol=1e-5)


def test_where_no_part_has_a_token_that_is_seen_nothing_comes_out():
    merged = MergedAttention()
    for _ in range(3):
        merged.add(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf))
    assert torch.equal(merged.out, torch.zeros(1, 1, 2, 4))
