"""Tiny random mixture-of-experts models of several families, each with the real transformers code of its family."""

from collections.abc import Callable

import torch
from transformers import (
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from models import tiny_models
from models.tiny_models import COMMON, random_model

NUM_EXPERTS, CHOICES = 6, 2
_LAYERS = {"num_hidden_layers": 3}
_ROUTED = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": CHOICES}


def deepseek_v3() -> PreTrainedConfig:
    """Latent attention, and a shared expert beside the others from the second layer on."""
    routed = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 48}
    return tiny_models.deepseek_v3(first_k_dense_replace=1, n_group=2, topk_group=1, **routed)


def gpt_oss() -> PreTrainedConfig:
    """Columns before rows, gate and up interleaved, biases."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    return GptOssConfig(**COMMON | _LAYERS | _LOCAL, layer_types=kinds, sliding_window=16)


def qwen3_next() -> PreTrainedConfig:
    """Linear attention and full attention mixed, a shared expert."""
    kinds = ["linear_attention", "full_attention", "full_attention"]
    shared = {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return tiny_models.qwen3_next(**_LAYERS | _ROUTED | shared, layer_types=kinds)


EXPERT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**COMMON | _LAYERS | _LOCAL),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON | _LAYERS | _ROUTED, norm_topk_prob=True),
    "olmoe": lambda: OlmoeConfig(**COMMON | _LAYERS | _ROUTED),
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "granite_moe": lambda: GraniteMoeConfig(**COMMON | _LAYERS | _LOCAL),
}


def expert_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of `family` that computes its experts one after the other, as transformers' models are written."""
    model = random_model(EXPERT_FAMILIES[family](), dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.1 * torch.randn_like(weight)  # biases and norms that do something
    model.set_experts_implementation("eager")
    return model
