"""The error of attention to the pages that a rule selects: in torch, for many queries at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from experiments.common.decoding import prefill
from experiments.quality.perplexity import divergence
from experiments.selection.page_rules import OURS, PAGE, RULES
from hf_hybrid_cache.cache_argument import cache_argument

SINK_TOKENS, RECENT_TOKENS = 64, 64
ENOUGH = 0.95
_NAME = "experiments_chosen_pages"


class Strategy(NamedTuple):
    """A rule that selects pages; each rule reads as many bytes as ours needs for `top_p`, index included."""

    rule: str
    top_p: float

    def __str__(self) -> str:
        return f"mass {self.top_p}" if self.rule == OURS else self.rule


class Attention:
    """
    Attention that reads a part, if there is a way.

    Attributes:
        way: `None` to read all.
        missed: by layer, the share of queries that are left with less than `ENOUGH` of their attention.
        pages: by layer, the share of pages that are read.
    """

    def __init__(self, way: Strategy | None = None):
        self.way = way
        self.missed: dict[int, float] = {}
        self.pages: dict[int, float] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as transformers calls it: `[1, heads, length, head_dim]`, the last tokens of `key` and `value`."""
        heads, length, head_dim = query.shape[1:]
        rows = query[0].unflatten(0, (key.shape[1], -1)) * (scaling or head_dim**-0.5)
        scores = torch.einsum("kgqd,ktd->kgqt", rows, key[0])
        places = torch.arange(key.shape[2])
        scores = scores.masked_fill(places > places[-length:, None], -torch.inf)
        if self.way is not None:
            weights = scores.softmax(-1)
            is_read, share = self._read(rows, key[0], scores)
            left = (weights * is_read).sum(-1)
            layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
            self.missed[layer_idx], self.pages[layer_idx] = float((left < ENOUGH).float().mean()), share
            scores = scores.masked_fill(~is_read, -torch.inf)
        out = scores.softmax(-1) @ value[0].unsqueeze(1)
        return out.reshape(1, heads, length, -1).transpose(1, 2).contiguous(), None

    def _read(self, rows: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, float]:
        """
        Select the tokens that each query reads, `[kv_heads, 1, length, tokens]`; return them with the share of pages.

        What is read in any case follows the newest query, for all of them.
        """
        assert self.way is not None
        tokens, head_dim = keys.shape[1:]
        end = SINK_TOKENS + (tokens - SINK_TOKENS - RECENT_TOKENS) // 64 * 64
        indexed = keys[:, SINK_TOKENS:end]
        rest = torch.cat([scores[..., :SINK_TOKENS], scores[..., end:]], dim=-1).logsumexp(-1, keepdim=True)

        def ordered(rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """The share of all that is not indexed, and the shares of pages, the largest first, with their places."""
            shares = torch.cat([rest, RULES[rule].worths(rows, indexed)], dim=-1).softmax(-1).mean(1)
            return shares[..., :1], *shares[..., 1:].sort(-1, descending=True)

        of_rest, shares, order = ordered(OURS)
        needed = (shares.cumsum(-1) - shares < self.way.top_p - of_rest).sum(-1, keepdim=True)
        if self.way.rule != OURS:
            _, _, order = ordered(self.way.rule)
            more = RULES[OURS].index_bytes(head_dim) - RULES[self.way.rule].index_bytes(head_dim)
            needed = needed + round(more * (end - SINK_TOKENS) / (PAGE * 4 * head_dim))
        chosen = torch.arange(order.shape[-1]) < needed
        chosen = torch.zeros_like(chosen).scatter(-1, order, chosen)
        is_read = torch.ones(len(keys), 1, rows.shape[2], tokens, dtype=torch.bool)
        is_read[..., SINK_TOKENS:end] = chosen.repeat_interleave(PAGE, dim=-1).unsqueeze(1)
        return is_read, float(chosen.float().mean())


@contextmanager
def attending(model: PreTrainedModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Let the model use this attention inside the block."""
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def compare(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, queries: int, ways: list[Strategy], chunk: int
) -> dict[str, dict[str, float]]:
    """
    Return the loss of each way to select pages against reading all, by name.

    Args:
        model: with layers of full attention only.
        cache: empty, its states can be read and cut.
        ids: [1, window + 1]
        queries: how many, the last tokens of the window.
        ways: to be compared.
        chunk: tokens at once before them.
    """
    window = ids.shape[1] - 1
    prefill(model, cache, ids[:, : window - queries], chunk)

    def run(attention: Attention) -> torch.Tensor:
        with attending(model, attention):
            logits = model(ids[:, window - queries : window], **cache_argument(cache)).logits[0]
        cache.crop(-queries)
        return logits.float().log_softmax(-1)

    expected, rows = run(Attention()), {}
    for way in ways:
        attention = Attention(way)
        found = run(attention)
        rows[str(way)] = {
            "mass": way.top_p,
            **divergence(found, expected),
            "worst_layer": max(attention.missed.values()),
            "all_layers": sum(attention.missed.values()) / len(attention.missed),
            "pages": sum(attention.pages.values()) / len(attention.pages),
        }
    return rows
