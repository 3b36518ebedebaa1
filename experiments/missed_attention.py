"""How much of its attention a query is left with where pages are chosen by the share that they carry: in torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from experiments.decoding import prefill

PAGE = 16
SINK_TOKENS, RECENT_TOKENS = 64, 64
ENOUGH = 0.95
_NAME = "experiments_missed_attention"


class Choice:
    """
    The rule of `Selection`, and what it leaves each query, by layer.

    Args:
        masses: shares to choose by; attention itself is to all tokens.
    """

    def __init__(self, masses: list[float]):
        self._masses = masses
        self.missed: dict[float, dict[int, float]] = {mass: {} for mass in masses}
        self.pages: dict[float, dict[int, float]] = {mass: {} for mass in masses}

    def attend(
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
        group, tokens = heads // key.shape[1], key.shape[2]
        rows = query[0].unflatten(0, (-1, group))
        scores = torch.einsum("kgqd,ktd->kgqt", rows, key[0]) * (scaling or head_dim**-0.5)
        places = torch.arange(tokens)
        scores = scores.masked_fill(places > places[tokens - length :, None], -torch.inf)
        weights = scores.softmax(-1)
        self._note(int(module.layer_idx), weights)  # type: ignore[arg-type]
        out = weights @ value[0].unsqueeze(1)
        return out.reshape(1, heads, length, -1).transpose(1, 2).contiguous(), None

    def _note(self, layer_idx: int, weights: torch.Tensor) -> None:
        """
        Choose pages for each query, as if it came alone.

        What is in full precision follows the newest query, for all of them.
        """
        tokens: int = weights.shape[-1]
        end = SINK_TOKENS + (tokens - SINK_TOKENS - RECENT_TOKENS) // 64 * 64
        of_pages = weights[..., SINK_TOKENS:end].unflatten(-1, (-1, PAGE)).sum(-1)
        full = weights.sum(-1) - of_pages.sum(-1)
        shared = of_pages.mean(1)  # of the queries of a KV head
        ordered, order = shared.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        for mass in self._masses:
            needed = before < (mass - full.mean(1)).unsqueeze(-1)
            chosen = torch.zeros_like(shared).scatter(-1, order, needed.to(shared.dtype))
            left = full + (of_pages * chosen.unsqueeze(1)).sum(-1)
            self.missed[mass][layer_idx] = float((left < ENOUGH).float().mean())
            self.pages[mass][layer_idx] = float(chosen.mean())


@contextmanager
def attending(model: PreTrainedModel, choice: Choice) -> Iterator[None]:
    """The model, with attention that notes what would be chosen."""
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, choice.attend)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def missed_shares(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, queries: int, masses: list[float], chunk: int
) -> dict[float, dict[str, float]]:
    """
    Which share of the queries is left with less than `ENOUGH` of its attention, by mass.

    Args:
        model: with layers of full attention only.
        cache: empty, its states can be read.
        ids: [1, window + 1]
        queries: how many, the last tokens of the window.
        masses: see `Selection`.
        chunk: tokens at once before them.
    """
    window = ids.shape[1] - 1
    prefill(model, cache, ids[:, : window - queries], chunk)
    choice = Choice(masses)
    with attending(model, choice):
        model(ids[:, window - queries : window], past_key_values=cache, logits_to_keep=1)
    return {
        mass: {
            "worst_layer": max(choice.missed[mass].values()),
            "all_layers": sum(choice.missed[mass].values()) / len(choice.missed[mass]),
            "pages": sum(choice.pages[mass].values()) / len(choice.pages[mass]),
        }
        for mass in masses
    }
