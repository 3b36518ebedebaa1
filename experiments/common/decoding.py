"""A model and a cache that decode together, one token a step."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_hybrid_cache.cache_argument import cache_argument


@torch.inference_mode()
def prefill(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """Run a prompt through the model in chunks; logits after its last token, `[vocabulary]`."""
    for piece in ids.split(chunk, dim=1):
        logits = model(piece, **cache_argument(cache), logits_to_keep=1).logits
    return logits[0, -1]


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a token reads, without other experts and embeddings that are only looked up."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings, output = (next(module.parameters()) for module in modules)
    unread = 0 if embeddings is output else embeddings.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - unread - unchosen_bytes(model)


def unchosen_bytes(model: PreTrainedModel, share: float = 1.0) -> int:
    """Return the bytes of the experts that a token does not choose, if `share` of the bytes of all is left."""
    config: Any = model.config
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    left = 1 - config.num_experts_per_tok / config.num_experts if experts else 0.0
    return int(share * left * sum(weight.numel() * weight.dtype.itemsize for weight in experts))


class GreedyDecoder:
    """Decodes greedily from a filled cache: `step` is one forward pass of one token."""

    def __init__(self, model: PreTrainedModel, cache: Cache, first_token: int = 1):
        self.cache = cache
        self.tokens = [first_token]
        self._model = model

    @torch.inference_mode()
    def step(self) -> None:
        output = self._model(torch.tensor([self.tokens[-1:]], device=self._model.device), **cache_argument(self.cache))
        self.tokens.append(int(output.logits[0, -1].argmax()))
