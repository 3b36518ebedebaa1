"""Attention of many queries to keys and values in blocks: a few thousand tokens at a time, by torch."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..storage import CodedStore, HostStore, KVStore
from .merging import MergedAttention

# Of one piece: long enough for torch, and short enough for the caches of a processor to hold what is taken out.
PIECE_TOKENS = 4096
# What `scaled_dot_product_attention` calls on the CPU; this way it also says by how much each row was divided.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_to_chunk(
    query: torch.Tensor, store: HostStore | CodedStore, group: int, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """
    Attend with many queries, the last tokens of `store`, to all of its tokens.

    Arguments are those of `attend_in_pieces`; a mask may be added to the scores, too, which is slower.

    Returns:
        `[batch, query_heads, query_length, value_dim]`, of the query's type.
    """
    if has_log_sums(store, mask):
        out, _ = attend_in_pieces(query, store, group, mask, scale, store.num_tokens - query.shape[2])
        return out.to(query.dtype)
    keys, values = (states.repeat_interleave(group, dim=1) for states in store.read())
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def has_log_sums(store: KVStore, mask: torch.Tensor | None) -> bool:
    """Whether torch says by how much it divided the rows, so that `attend_in_pieces` can attend to `store`."""
    return store.shape.key_dim == store.shape.value_dim and (mask is None or mask.dtype == torch.bool)


def attend_in_pieces(
    query: torch.Tensor,
    store: HostStore | CodedStore,
    group: int,
    mask: torch.Tensor | None,
    scale: float | None,
    first_of_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attend to all tokens of `store`, whose states are never all outside of their blocks at once.

    Query heads that share a KV head are seen as more queries of one head, instead of repeating keys and values for
    them. What pieces give is merged, see `merging`.

    Args:
        query: `[batch, query_heads, query_length, head_dim]`, on the CPU.
        store: its keys and values share batch, type and head_dim with the query; not empty.
        group: query heads that share a KV head.
        mask: boolean, true where a token is seen; `[batch, query_heads, query_length, tokens]`, where any of the first
            three may be 1.
        scale: of the scores; `None` for `head_dim ** -0.5`.
        first_of_chunk: token from which on the mask hides some.

    Returns:
        `[batch, query_heads, query_length, value_dim]`, and, without the last axis, natural logs of what rows were
        divided by.
    """
    batch, heads, length, head_dim = query.shape
    rows = query.reshape(batch, heads // group, group * length, head_dim)
    merged = MergedAttention()
    for start, (keys, values) in store.pieces(PIECE_TOKENS, first_of_chunk):
        seen = None if mask is None else mask[..., start : start + keys.shape[2]]
        if seen is None or bool(seen.all()):
            merged.add(*_flash_attention(rows, keys, values, scale=scale))
            continue
        seen = _of_rows(seen, query.shape, group)
        bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        out, log_sums = _flash_attention(rows, keys, values, attn_mask=bias, scale=scale)
        # Where no token is seen torch says 0 for both. A weight of 0 does not hide what is not finite.
        out += 0 * values.abs().amax(dim=2, keepdim=True)
        merged.add(out, log_sums.masked_fill(~seen.any(dim=-1), -torch.inf))
    assert merged.out is not None
    assert merged.log_sums is not None
    return merged.out.reshape(batch, heads, length, -1), merged.log_sums.reshape(batch, heads, length)


def _of_rows(mask: torch.Tensor, shape: torch.Size, group: int) -> torch.Tensor:
    """A mask of queries `[..., query_length, tokens]` as one of the rows that share a KV head."""
    _, heads, length, _ = shape
    if mask.shape[1] == 1:
        return mask.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
    return mask.expand(-1, -1, length, -1).reshape(-1, heads // group, group * length, mask.shape[3])
