"""Tiny random models of several families, each with the real transformers code of its family."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

VOCAB_SIZE = 128
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


def llama() -> PreTrainedConfig:
    return LlamaConfig(**COMMON, num_hidden_layers=4)


def mistral_sliding() -> PreTrainedConfig:
    """Every layer has a sliding window, so no layer is ours."""
    return MistralConfig(**COMMON, num_hidden_layers=3, sliding_window=16)


def gemma3() -> PreTrainedConfig:
    """Sliding and full layers mixed."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **COMMON, num_hidden_layers=4, sliding_window=16, layer_types=kinds, query_pre_attn_scalar=16
    )


def gemma4_shared() -> PreTrainedConfig:
    """The last two layers read the keys and values of earlier ones."""
    kinds = [*["full_attention"] * 3, "sliding_attention", "full_attention", "full_attention"]
    return Gemma4TextConfig(
        **COMMON,
        num_hidden_layers=6,
        sliding_window=16,
        layer_types=kinds,
        num_kv_shared_layers=2,
        num_global_key_value_heads=2,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
    )


def qwen3_next(**changes: Any) -> PreTrainedConfig:
    """Linear attention and full attention mixed."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    settings = COMMON | {"num_hidden_layers": 4, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]} | heads
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2}
    return Qwen3NextConfig(**settings | kinds | {"linear_key_head_dim": 16, "linear_value_head_dim": 16} | changes)


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    """Multi-head latent attention: keys and values of different width."""
    settings = {name: value for name, value in COMMON.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 3}
    return DeepseekV3Config(**settings | ranks | widths | layers | changes)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "mistral_sliding": mistral_sliding,
    "gemma3": gemma3,
    "gemma4_shared": gemma4_shared,
    "qwen3_next": qwen3_next,
    "deepseek_v3": deepseek_v3,
}


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of `family`; the same one for the same arguments."""
    return random_model(FAMILIES[family](), seed, dtype=dtype)


def random_model(config: PreTrainedConfig, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model with random weights, and options of `from_config`."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()


def random_prompt(batch: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Token ids `[batch, num_tokens]`, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, num_tokens), generator=generator)
