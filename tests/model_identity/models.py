"""Small random models that a test may change."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.model_identity import Identity, identity_of

from models.tiny_models import COMMON, llama


def new_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A new model, with other settings than usual if there are changes."""
    config = type(llama())(**COMMON | {"num_hidden_layers": 2} | changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def identity(model: PreTrainedModel) -> Identity:
    return identity_of(model, DynamicHybridCache(model.config))


def differing(one: Identity, other: Identity) -> set[str]:
    """Names of the fields that differ."""
    assert (one.digest == other.digest) == (one == other)
    return {line.partition(":")[0] for line in one.differences(other)}


class Adapted(nn.Module):
    """A linear layer with adapters of two names, and the attributes that PEFT's layers have."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self._active_adapter: str | list[str] = "german"
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"german": 2.0, "french": 2.0}
        sizes = {"german": 4, "french": 4}
        self.lora_A = nn.ModuleDict({k: nn.Linear(base_layer.in_features, r, bias=False) for k, r in sizes.items()})
        self.lora_B = nn.ModuleDict({k: nn.Linear(r, base_layer.out_features, bias=False) for k, r in sizes.items()})

    @property
    def active_adapter(self) -> str | list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters
