"""
Prompts that begin alike, and what a cache holds after reading them through a store.

    first, second = prompts(common=300, first=20, second=40)
    # Reads both through one store; the second has the bits of a cold read, and found 300 of its tokens there.
    assert hits(folder, model, DynamicHybridCache, first, second) == [0, 300]
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.files.layers import tensors_by_name
from hf_hybrid_cache.layers import HybridLayer
from hf_hybrid_cache.prefix_store import PrefixStore, StoredPrompt

from models.tiny_models import random_prompt

FORMS: dict[str, Callable[..., HybridCache]] = {
    "full": DynamicHybridCache,
    "quantized": QuantizedHybridCache,
    "offloaded": OffloadedHybridCache,
}


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


def hits(
    folder: Path, model: PreTrainedModel, make: Callable[[Any], HybridCache], *prompts: torch.Tensor, document: int = 0
) -> list[int]:
    """Read prompts through a store, the last one with the bits of a cold read; return how many tokens each found."""

    def read_once(name: str, prompt: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        return read(folder / name, model, prompt, make(model.config), document)

    (_, cold), found = read_once("cold", prompts[-1]), []
    for prompt in prompts:
        num_tokens, states = read_once("store", prompt)
        assert prompt is not prompts[-1] or are_equal(states, cold)
        found.append(num_tokens)
    return found


class Talk:
    """
    A conversation about a document, whose states are in a store.

        talk = Talk(folder, tiny_model("llama"), QuantizedHybridCache, document)
        talk.tokens = talk.said(20)   # a question of 20 tokens, and an answer
        talk.keep()
    """

    def __init__(self, folder: Path, model: PreTrainedModel, make: Callable[..., HybridCache], document: torch.Tensor):
        self.make, self.length, self.new_tokens = make, document.shape[1], 20
        self.model, self.store, self.tokens = model, PrefixStore(folder), document
        self.cache = make(self.model.config)
        self.store.prefill(self.model, self.tokens, self.cache, document_tokens=self.length, progress=False)

    def said(self, count: int, seed: int = 1, cache: HybridCache | None = None) -> torch.Tensor:
        """Read a question of `count` tokens, and generate an answer token by token; return all tokens."""
        question = (random_prompt(1, count, seed) % 80 + 5).to(self.tokens.device)
        whole = torch.cat([self.tokens, question], dim=1)
        options = cache_argument(self.cache if cache is None else cache)
        return self.model.generate(whole, **options, max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=None)

    def keep(self, **options: Any) -> str:
        return self.store.keep(self.model, self.tokens, self.cache, document_tokens=self.length, **options)

    def resumed(self, stored: StoredPrompt) -> HybridCache:
        """Return another cache with what is stored, which is what this one has."""
        cache = self.make(self.model.config)
        self.store.resume(self.model, stored, cache)
        assert cache.get_seq_length() == self.cache.get_seq_length()
        assert are_equal(held(cache), held(self.cache))
        return cache

    def assert_goes_on_alike(self, stored: StoredPrompt, count: int, seed: int) -> None:
        """Resume it with another cache, let both go on, and compare tokens and states."""
        resumed = self.resumed(stored)
        tokens, self.tokens = self.said(count, seed, resumed), self.said(count, seed)
        assert torch.equal(tokens, self.tokens)
        assert are_equal(held(resumed), held(self.cache))

    def stored(self, own_id: str) -> StoredPrompt:
        return next(each for each in self.store.prompts() if each.id == own_id)


def alter_states(folder: Path) -> None:
    """Alter a byte of the states in each file of a store."""
    for path in folder.glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
