"""Mixture-of-experts models with random weights, in real shapes cut to a few layers. Not an experiment of its own."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_hybrid_cache.models import load_config


def cut_config(name: str, layers: int) -> PreTrainedConfig:
    """A shape with so many layers, and a vocabulary that is less by as much: a step keeps its proportions."""
    config: Any = load_config(name)
    config.vocab_size = config.vocab_size * layers // config.num_hidden_layers
    config.num_hidden_layers = layers
    for kinds in ("layer_types", "mlp_only_layers"):
        if getattr(config, kinds, None):
            setattr(config, kinds, getattr(config, kinds)[-layers:])
    return config


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model with the random weights that transformers initializes."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own with the very same parameters."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def has_experts(model: PreTrainedModel) -> bool:
    return bool(expert_names(model))


def expert_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that hold experts."""
    return [name for name, _ in model.named_modules() if name.endswith(".experts")]
