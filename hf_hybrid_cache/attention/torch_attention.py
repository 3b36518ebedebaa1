"""
Partial attention to some tokens of a sequence: by torch, with the lse of each row, and merged into attention to all.

The output for some tokens and its lse (log-sum-exp of the scores) are all that merging needs (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..codecs import as_written
from ..storage import Pair, Store
from .queries import Queries

# Tokens of a piece: enough for torch to be fast, and few enough for their copy to stay in the processor's caches.
PIECE_TOKENS = 4096
_LOWEST = torch.finfo(torch.float32).min
# Most tokens and scores of one plain product: scores, and keys and values in float32, take memory.
_PLAIN_TOKENS, _PLAIN_SCORES = 16_384, 2**26
_LONGEST_FLASH_HEAD = 256
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_on_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default


class PartialAttention(NamedTuple):
    """
    The result of attention to some of the tokens.

    Attributes:
        out: `[batch, heads, rows, head_dim]`, softmax of the scores of these tokens times their values.
        lse: float32, or float64, `[batch, heads, rows]`, natural log of the sum of the exponentials of these scores;
            minus infinity where none of the tokens is seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32


def merged(first: PartialAttention | None, last: PartialAttention) -> PartialAttention:
    """Merge two partial results; the last one is all if there is no first one."""
    if first is None:
        return last
    return PartialAttention(merged_out(first, last), torch.logaddexp(first.lse, last.lse))


def merged_out(first: PartialAttention, last: PartialAttention, is_masked: bool = True) -> torch.Tensor:
    """
    Return the output of two partial results, in memory of its own.

    Without masks each row sees tokens of both, and one operation less is needed: each counts where attention has just
    used all caches of the processor.
    """
    weight = torch.sigmoid(last.lse - first.lse)
    if is_masked:
        weight.masked_fill_(last.lse.isneginf(), 0)
    dtype = widest(first.out, last.out)
    return torch.lerp(first.out.to(dtype), last.out.to(dtype), weight.unsqueeze(-1).to(dtype))


def merged_at_once(outs: torch.Tensor, lse: torch.Tensor) -> PartialAttention:
    """Merge partial results `[results, ..., head_dim]` and `[results, ...]`; zeros where no token is seen."""
    # If no token is seen, the weights do not matter: all outputs are zero.
    weights = lse.clamp_min(_LOWEST).softmax(dim=0)
    return PartialAttention((outs * weights.unsqueeze(-1)).sum(dim=0), lse.logsumexp(dim=0))


def attend_to_states(queries: Queries, read: Callable[[], Pair]) -> PartialAttention:
    """
    Attend to the states that `read` returns, at least one token on the device of the queries.

    Query heads that share a KV head are seen as more queries of one head, so that what is stored is read once.
    """
    rows = queries._replace(states=queries.rows(), mask=_rows_of_mask(queries, queries.mask))
    return _of_heads(queries, attend_by_torch(rows, *read()))


def attend_in_pieces(queries: Queries, store: Store) -> PartialAttention:
    """Attend to a store piece by piece."""
    rows, total = queries._replace(states=queries.rows()), None
    for start, (keys, values) in store.in_pieces(PIECE_TOKENS):
        seen = queries.of_tokens((start, start + keys.shape[2])).mask
        if seen is not None and seen.dtype == torch.bool and seen.all():
            seen = None
        rows = rows._replace(mask=_rows_of_mask(queries, seen))
        total = merged(total, attend_by_torch(rows, keys, values))
    assert total is not None
    return _of_heads(queries, total)


def _rows_of_mask(queries: Queries, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of queries as one of their rows."""
    if mask is None:
        return None
    _, heads, length, _ = queries.states.shape
    group = queries.group
    if mask.shape[1] == 1:
        return mask.expand(-1, -1, length, -1).repeat(1, 1, group, 1)
    return mask.expand(-1, -1, length, -1).reshape(-1, heads // group, group * length, mask.shape[3])


def _of_heads(queries: Queries, rows: PartialAttention) -> PartialAttention:
    """Return the result of rows as one of the queries."""
    shape = queries.states.shape[:3]
    return PartialAttention(rows.out.reshape(*shape, -1), rows.lse.reshape(shape))


def attend_by_torch(rows: Queries, keys: torch.Tensor, values: torch.Tensor) -> PartialAttention:
    """
    Attend to keys and values, at least one token, on the device that they are on; types may differ, as under autocast.

    All are `[batch, heads, rows or tokens, dim]`, and the mask is `[batch, heads, rows, tokens]`. Results have the
    query's type or float32, or float64 if any argument has it.
    """
    query, mask, key_dim = rows.states, rows.mask, keys.shape[3]
    fits = rows.cap is None and query.dtype == keys.dtype == values.dtype and key_dim == values.shape[3]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    with as_written(query.device):
        if fits and query.is_cpu:
            return _attend_on_cpu(query, keys, values, mask, rows.scale)
        if fits and query.is_cuda and is_half and key_dim <= _LONGEST_FLASH_HEAD and mask is None:
            return _attend_on_cuda(query, keys, values, rows.scale)
        return attend_plainly(rows, keys, values)


def attend_plainly(rows: Queries, keys: torch.Tensor, values: torch.Tensor) -> PartialAttention:
    """Attend by plain products in float32 or float64, for any device, types, width, mask and soft cap."""
    query, mask, scale, cap = rows.states, rows.mask, rows.scale, rows.cap
    dtype = widest(query, keys, values)
    query = query.to(dtype) * (query.shape[3] ** -0.5 if scale is None else scale)
    total = None
    at_once = max(64, min(_PLAIN_TOKENS, _PLAIN_SCORES // max(1, query.shape[:3].numel())))
    for start in range(0, keys.shape[2], at_once):
        tokens = slice(start, start + at_once)
        scores = query @ keys[:, :, tokens].to(dtype).mT
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores += _as_bias(mask[..., tokens], dtype)
        lse = scores.logsumexp(dim=-1)
        # All weights are 0 if no token is seen.
        weights = torch.exp(scores - lse.clamp_min(_LOWEST).unsqueeze(-1))
        total = merged(total, PartialAttention(weights @ values[:, :, tokens].to(dtype), lse))
    assert total is not None
    return total


def _attend_on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> PartialAttention:
    if mask is None:
        return PartialAttention(*_on_cpu(query, keys, values, scale=scale))
    bias = _as_bias(mask, query.dtype)
    out, lse = _on_cpu(query, keys, values, attn_mask=bias, scale=scale)
    # If no token is seen, torch returns 0 for both. A weight of 0 does not hide values that are not finite.
    out += 0 * values.abs().amax(dim=2, keepdim=True)
    return PartialAttention(out, lse.masked_fill(bias.isneginf().all(dim=-1), -torch.inf))


def _attend_on_cuda(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> PartialAttention:
    """Attend by flash attention; pad heads to groups of 8 channels, as `scaled_dot_product_attention` does for it."""
    head_dim = query.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    if missing := -head_dim % 8:
        query, keys, values = (pad(states, (0, missing)) for states in (query, keys, values))
    out, lse, *_ = _on_cuda(query, keys, values, scale=scale)
    return PartialAttention(out[..., :head_dim], lse)


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as numbers that are added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
