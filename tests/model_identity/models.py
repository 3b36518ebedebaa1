"""Small random models that a test may change."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_hybrid_cache import DynamicHybridCache
from hf_hybrid_cache.model_identity import Identity, identity_of

from models.tiny_models import COMMON, llama


def new_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A new model, with other settings than usual if there are changes."""
    config = type(llama())(**COMMON | {"num_hidden_layers": 2} | changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def identity(model: PreTrainedModel, name: str | None = None) -> Identity:
    return identity_of(model, DynamicHybridCache(model.config), name)


def differing(one: Identity, other: Identity) -> set[str]:
    """Names of the fields that differ."""
    assert (one.digest == other.digest) == (one == other)
    return {line.partition(":")[0] for line in one.differences(other)}


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**options | changes)


def adapted(**changes: Any) -> Any:
    """A small model with the adapters "german", which is active, and "french"."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(new_llama(), lora(**changes), adapter_name="german")
    model.add_adapter("french", lora(**changes))
    return model.eval()
