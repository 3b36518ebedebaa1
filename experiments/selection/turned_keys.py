"""Keys of which some pages carry the attention by construction, for one layer or a model with random weights."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from experiments.selection.chosen_pages import attending
from experiments.selection.page_rules import PAGE
from hf_hybrid_cache.cache_argument import cache_argument

# The scores of the pages that matter are higher by this than all others.
HIGHER = 14.0
# Values shrink to this, so that attention hardly changes the queries of the layers above from step to step.
_SMALL = 1 / 64


def pages_that_matter(heads: int, tokens: int, share: float) -> torch.Tensor:
    """Mark the tokens of `share` of the pages, chosen at random, `[heads, tokens]`."""
    pages = torch.rand(heads, tokens // PAGE + 1) < share
    return pages.repeat_interleave(PAGE, dim=1)[:, :tokens]


def turned_towards_queries(config: LlamaConfig, keys: torch.Tensor, share: float) -> torch.Tensor:
    """Change `keys` of `share` of the pages so that they lie in the direction of the queries, which are returned."""
    _, heads, tokens, head_dim = keys.shape
    direction = torch.nn.functional.normalize(torch.randn(heads, 1, head_dim), dim=-1)
    matters = pages_that_matter(heads, tokens, share)[None, :, :, None]
    keys += (matters * HIGHER * direction).to(keys.dtype)
    queries = direction.repeat_interleave(config.num_attention_heads // heads, dim=0)
    noise = 0.2 * torch.randn(config.num_attention_heads, 1, head_dim)
    return ((queries * head_dim**0.5 if share else 0) + noise)[None].to(keys.dtype)


@torch.inference_mode()
def turn_keys(model: PreTrainedModel, cache: DynamicCache, token: int, share: float) -> None:
    """
    Turn the keys of `share` of the pages, spread at random, so that they carry the attention when `token` is given.

    In one step, in which each layer's keys are turned towards its own queries before these attend. Only channels that
    rotary embedding hardly turns from a step to the next are changed, so that the next steps, of the same token, find
    the same; values become small, so that they change the queries of the layers above as little.

    Args:
        model: with rotary embedding that turns the first half of the channels with the second, the fastest ones first,
            as Llama's does.
        cache: filled; the step's token is taken out again.
        token: that will be given at each step.
        share: of the pages.
    """
    with attending(model, Turning(share)):
        model(torch.tensor([[token]]), **cache_argument(cache))
    cache.crop(-1)


class Turning:
    """Attention of one query that turns `share` of the pages towards itself before it attends."""

    def __init__(self, share: float):
        self._share = share

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
        """Attend to `[1, kv_heads, tokens, head_dim]` with `[1, heads, 1, head_dim]`, as transformers calls it."""
        _, heads, tokens, head_dim = key.shape
        slow = torch.arange(head_dim) % (head_dim // 2) >= head_dim // 4
        rows = query[0, :, 0].unflatten(0, (heads, -1)).float() * (scaling or head_dim**-0.5)
        # The shortest direction whose product with each of a KV head's queries is what scores are to be higher by.
        direction = HIGHER * torch.linalg.pinv(rows * slow).sum(-1)
        matters = pages_that_matter(heads, tokens, self._share)[:, :-1]
        key[0, :, :-1] += (matters[..., None] * direction[:, None]).to(key.dtype)
        value *= _SMALL
        out = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
