"""Torch's own attention, with the lse of each row."""

import torch
from torch.nn.functional import pad

from .merging import MergedAttention, PartialAttention, widest

_LOWEST = torch.finfo(torch.float32).min
# Most tokens and scores of one plain product: scores, and keys and values in float32, take memory.
_PLAIN_TOKENS, _PLAIN_SCORES = 16_384, 2**26
_LONGEST_FLASH_HEAD = 256
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_on_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default


def attend_by_torch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> PartialAttention:
    """
    Attend to keys and values on the device that they are on.

    Args:
        query: `[batch, heads, rows, key_dim]`, on that device. Types may differ, as under autocast.
        keys: `[batch, heads, tokens, key_dim]`, at least one token.
        values: `[batch, heads, tokens, value_dim]`.
        mask: boolean (true where a token is seen) or added to the scores; `[batch, heads, rows, tokens]`, where any of
            the first three may be 1.
        scale: of the scores; `None` for `key_dim ** -0.5`.

    Returns:
        Results of the query's type or float32, or float64 if any argument is, see `PartialAttention`.
    """
    key_dim, value_dim = keys.shape[3], values.shape[3]
    has_one_type = query.dtype == keys.dtype == values.dtype
    if query.is_cpu and key_dim == value_dim and has_one_type:
        return _attend_on_cpu(query, keys, values, mask, scale)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and is_half and has_one_type and key_dim == value_dim <= _LONGEST_FLASH_HEAD and mask is None:
        return _attend_on_cuda(query, keys, values, scale)
    return attend_plainly(query, keys, values, mask, scale)


def attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> PartialAttention:
    """Attend by plain products in float32 or float64, for any device, types, width and mask."""
    dtype = widest(query, keys, values)
    rows = query.to(dtype) * (query.shape[3] ** -0.5 if scale is None else scale)
    merged = MergedAttention()
    at_once = max(64, min(_PLAIN_TOKENS, _PLAIN_SCORES // max(1, query.shape[:3].numel())))
    for start in range(0, keys.shape[2], at_once):
        tokens = slice(start, start + at_once)
        scores = rows @ keys[:, :, tokens].to(dtype).mT
        if mask is not None:
            scores += _as_bias(mask[..., tokens], dtype)
        lse = scores.logsumexp(dim=-1)
        # All weights are 0 if no token is seen.
        weights = torch.exp(scores - lse.clamp_min(_LOWEST).unsqueeze(-1))
        merged.add(PartialAttention(weights @ values[:, :, tokens].to(dtype), lse))
    assert merged.partial is not None
    return merged.partial


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
