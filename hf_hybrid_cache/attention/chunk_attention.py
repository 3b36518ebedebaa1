"""Attention of many queries to keys and values in blocks: a few thousand tokens at a time, by torch."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..storage import Store, middle_in_pieces
from .merging import MergedAttention, PartialAttention
from .segment import rows_of_mask
from .torch_attention import attend_by_torch

# Tokens of a piece: enough for torch to be fast, and few enough for their copy to stay in the processor's caches.
PIECE_TOKENS = 4096


def attend_to_chunk(
    query: torch.Tensor, store: Store, group: int, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """
    Attend with many queries, the last tokens of `store`, to all of its tokens.

    Arguments are those of `attend_in_pieces`; a mask may be added to the scores, too, which is slower.

    Returns:
        `[batch, query_heads, query_length, value_dim]`, of the query's type.
    """
    if has_lse(store, mask):
        out, _ = attend_in_pieces(query, store, group, mask, scale, store.middle_tokens - query.shape[2])
        return out.to(query.dtype)
    keys, values = (states.repeat_interleave(group, dim=1) for states in store.read())
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def has_lse(store: Store, mask: torch.Tensor | None) -> bool:
    """Return whether torch's fast attention returns the lse of the rows of `attend_in_pieces`."""
    return store.shape.key_dim == store.shape.value_dim and (mask is None or mask.dtype == torch.bool)


def attend_in_pieces(
    query: torch.Tensor,
    store: Store,
    group: int,
    mask: torch.Tensor | None,
    scale: float | None,
    first_of_chunk: int,
) -> PartialAttention:
    """
    Attend to all tokens of `store`, whose states are copied out of their blocks a piece at a time.

    Query heads that share a KV head are seen as more queries of one head, instead of repeating keys and values for
    them. The partial results of pieces are merged, see `merging`.

    Args:
        query: `[batch, query_heads, query_length, head_dim]`, on the CPU.
        store: its keys and values share batch and type with the query; not empty.
        group: query heads that share a KV head.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, query_heads, query_length,
            tokens]`, where any of the first three may be 1.
        scale: of the scores; `None` for `head_dim ** -0.5`.
        first_of_chunk: token from which on the mask hides some.

    Returns:
        `[batch, query_heads, query_length, value_dim]`, see `PartialAttention`.
    """
    batch, heads, length, head_dim = query.shape
    rows = query.reshape(batch, heads // group, group * length, head_dim)
    merged = MergedAttention()
    for start, (keys, values) in middle_in_pieces(store, PIECE_TOKENS, first_of_chunk):
        seen = None if mask is None else mask[..., start : start + keys.shape[2]]
        if seen is not None:
            hides = seen.dtype != torch.bool or not seen.all()
            seen = rows_of_mask(seen, query.shape, group) if hides else None
        merged.add(attend_by_torch(rows, keys, values, seen, scale))
    assert merged.partial is not None
    out, lse = merged.partial
    return PartialAttention(out.reshape(batch, heads, length, -1), lse.reshape(batch, heads, length))
