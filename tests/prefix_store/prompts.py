"""Prompts that begin alike, and what a cache holds after reading them through a store."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.layers import tensors_by_name
from hf_hybrid_cache.files.tensor_file import TensorFile
from hf_hybrid_cache.layers import HybridLayer
from hf_hybrid_cache.prefix_store import PrefixStore
from hf_hybrid_cache.prefix_store.filling import states_of
from hf_hybrid_cache.prefix_store.states import NodeStates

from models.tiny_models import random_prompt

FORMS: dict[str, Callable[..., HybridCache]] = {
    "full": DynamicHybridCache,
    "quantized": QuantizedHybridCache,
    "offloaded": OffloadedHybridCache,
}


class Written(NamedTuple):
    """The file of a node, and up to which token it is used."""

    path: Path
    end: int

    def open(self) -> TensorFile:
        return TensorFile(self.path, self.path.open("rb", buffering=0))

    def states(self) -> NodeStates:
        with self.open() as file:
            return states_of(file)


def prompts(common: int, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two prompts, `[1, tokens]`, with so many tokens in common and so many of their own."""
    beginning, one, other = random_prompt(1, common), random_prompt(1, first, 1), random_prompt(1, second, 2)
    other[0, 0] = one[0, 0] % 100 + 4
    assert one[0, 0] != other[0, 0]
    return torch.cat([beginning, one], dim=1), torch.cat([beginning, other], dim=1)


def held(cache: HybridCache) -> list[torch.Tensor]:
    """Return copies of all states of a cache."""
    tensors: list[torch.Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, HybridLayer):
            assert layer.keys is not None
            assert layer.values is not None
            tensors += [layer.keys.clone(), layer.values.clone()]
        else:
            tensors += [tensor.clone() for tensor in tensors_by_name(layer).values()]
    return tensors


@torch.no_grad()
def next_logits(model: PreTrainedModel, token_ids: torch.Tensor, cache: HybridCache) -> torch.Tensor:
    """Return the logits of the tokens that a cache lacks, `[tokens, vocabulary]`."""
    return model(token_ids[:, cache.get_seq_length() :], **cache_argument(cache)).logits[0]


def read(
    folder: Path, model: PreTrainedModel, prompt: torch.Tensor, cache: HybridCache, document_tokens: int = 0
) -> tuple[int, list[torch.Tensor]]:
    """Read a prompt through the store of a folder; return how many tokens were stored, and all states and logits."""
    reuse = PrefixStore(folder).prefill(model, prompt, cache, document_tokens=document_tokens, progress=False)
    states = held(cache)
    return reuse.num_tokens, [*states, next_logits(model, prompt, cache)]


def are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all states are equal to the bit."""
    return len(states) == len(others) and all(map(torch.equal, states, others))
