"""
Rules by which the pages of a context that matter to a query can be found, in torch: ours, and those of others.

Each tells what a page of 16 tokens is worth from an index of the keys, which is smaller than they are. Nothing of the
package is used here, so that its kernels have something to be compared with.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

PAGE, BLOCK = 16, 64
OURS, EXACT = "2-bit codes", "exact scores"


class Rule(NamedTuple):
    """
    A rule for choosing pages.

    Attributes:
        worths: of queries `[kv_heads, group, length, head_dim]`, scaled, and keys `[kv_heads, tokens, head_dim]`, whole
            blocks: the logarithm of what each page is worth, `[kv_heads, group, length, pages]`.
        index_bytes: that are read of a token and KV head, by head_dim, where keys have 16 bits.
    """

    worths: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    index_bytes: Callable[[int], float]


def by_tokens(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Rate pages by the scores of each of their tokens."""
    scores = torch.einsum("kgqd,ktd->kgqt", queries, keys)
    return scores.unflatten(-1, (-1, PAGE)).logsumexp(-1)


def quantized(keys: torch.Tensor) -> torch.Tensor:
    """
    Keys as codes of 2 bits have them: the mean of a block apart, rotated, a scale for each.

    The rotation is that of Hadamard over the largest power of two that divides head_dim.
    """
    matrix, size = torch.ones(1, 1), keys.shape[-1] & -keys.shape[-1]
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix = matrix / math.sqrt(size)
    blocks = keys.unflatten(-2, (-1, BLOCK))
    means = blocks.mean(-2, keepdim=True)
    left = ((blocks - means).unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    step = 0.9957 * left.square().mean(-1, keepdim=True).sqrt()
    codes = ((left / step.clamp_min(1e-30) + 2).floor().clamp(0, 3)) - 1.5
    scale = (left * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
    back = ((scale * codes).unflatten(-1, (-1, size)) @ matrix.T).flatten(-2)
    return (means + back).flatten(-3, -2)


def by_few_channels(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """SparQ (arXiv:2312.04985): the quarter of the channels that is largest in the queries of a KV head."""
    sizes = queries.abs()
    most = sizes.sum(1).topk(queries.shape[-1] // 4, dim=-1).indices
    mask = torch.zeros_like(queries[:, 0]).scatter(-1, most, 1.0)[:, None]
    warmth = ((sizes * mask).sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True)).sqrt()
    return by_tokens(queries * mask / warmth, keys)


def by_means(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The score of the mean of a page's keys."""
    return torch.einsum("kgqd,kpd->kgqp", queries, keys.unflatten(-2, (-1, PAGE)).mean(-2)) + math.log(PAGE)


def by_boxes(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Quest (arXiv:2406.10774): the highest score that a key within the least and the largest of each channel has."""
    pages = keys.unflatten(-2, (-1, PAGE))
    highest = torch.einsum("kgqd,kpd->kgqp", queries.clamp_min(0), pages.amax(-2))
    return highest + torch.einsum("kgqd,kpd->kgqp", queries.clamp_max(0), pages.amin(-2)) + math.log(PAGE)


def _index_bytes(head_dim: int) -> float:
    """Return the bytes a key of our index: its codes and scale, and its part of the block's mean."""
    return head_dim / 4 + 2 + 2 * head_dim / BLOCK


RULES = {
    OURS: Rule(lambda queries, keys: by_tokens(queries, quantized(keys)), _index_bytes),
    # The best there can be: as if its index were not larger than ours.
    EXACT: Rule(by_tokens, _index_bytes),
    "a quarter of the channels (SparQ)": Rule(by_few_channels, lambda dim: dim / 2),
    "box of a page (Quest)": Rule(by_boxes, lambda dim: 4 * dim / PAGE),
    "mean of a page": Rule(by_means, lambda dim: 2 * dim / PAGE),
}
