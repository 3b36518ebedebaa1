"""Small random models of every causal architecture that transformers has, as far as its config can be shrunk."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from models.tiny_models import random_model

CONFIGS = {config.__name__: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
MOST_PARAMETERS = 20_000_000
# Each has kinds of layers, of attention, of positions or of weights that the others have not.
REPRESENTATIVES = {
    "BloomConfig": "a bias of the distance for positions, queries, keys and values from one matrix",
    "DeepseekV3Config": "attention to latents",
    "DeepseekV32Config": "attention to tokens that an index chooses",
    "DeepseekV4Config": "compressed keys and values",
    "FalconConfig": "one KV head",
    "FalconH1Config": "state spaces beside attention in each layer",
    "GPT2Config": "learned positions, columns before rows",
    "GPTNeoConfig": "local and global attention",
    "Gemma2Config": "soft-capping",
    "Gemma3TextConfig": "windows and full attention",
    "GptOssConfig": "attention sinks, experts in columns before rows",
    "GraniteMoeConfig": "experts of one matrix for gate and up",
    "InklingTextConfig": "convolutions beside attention with windows in each layer",
    "JambaConfig": "state spaces and attention, experts",
    "Lfm2Config": "convolutions and attention",
    "Llama4TextConfig": "attention in chunks",
    "LlamaConfig": "the usual",
    "MambaConfig": "no attention",
    "MistralConfig": "windows alone",
    "MixtralConfig": "experts",
    "NemotronHConfig": "layers that hold nothing",
    "OlmoeConfig": "norms of all heads together, experts",
    "Phi3Config": "rotations that depend on the length",
    "Qwen2Config": "biases of queries, keys and values alone",
    "Qwen3MoeConfig": "normed queries and keys, experts",
    "Qwen3NextConfig": "linear and full attention",
    "WhisperConfig": "the decoder of a model of two parts",
}

# Attributes of sizes, by the names that configs have for them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "num_key_value_heads"), 2),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "encoder_layers"), 1),
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "encoder_attention_heads": 4,
    "rotary_dim": 4,
    "initializer_range": 0.2,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Further settings of some: sizes that depend on each other, attention among few layers, or an attribute left out.
_LEFT_OUT = {"FalconConfig": {"head_dim"}}
_CHANGES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"] * 2},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "JambaConfig": {"num_hidden_layers": 8},
    "KimiLinearConfig": {"num_hidden_layers": 8},
    "BailingHybridConfig": {"num_hidden_layers": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": 8},
}


def small_config(name: str, is_wider: bool = False) -> PreTrainedConfig:
    """
    The config of a class, with its defaults but for sizes; those of a model of several parts in its text part.

    If it `is_wider`, hidden states, gates and heads have multiples of sixteen numbers, as kernels have them.
    """
    config_class = CONFIGS[name]
    default = config_class()
    text = default.get_text_config(decoder=True)
    sizes = {key: size for key, size in _SIZES.items() if getattr(text, key, None) is not None}
    if hasattr(text, "kv_lora_rank"):  # latents that all heads share
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key in _LEFT_OUT.get(name, ()):
        sizes.pop(key, None)
    if is_wider:
        sizes.update({key: 2 * size for key, size in sizes.items() if size in (8, 32, 48)}, sliding_window=80)
        sizes = {key: size for key, size in sizes.items() if getattr(text, key, None) is not None}
    settings = {**sizes, **_TOKENS, **_CHANGES.get(name, {})}
    part = next((key for key in config_class.sub_configs if getattr(default, key, None) is text), None)
    return config_class(**settings) if part is None else config_class(**{part: type(text)(**settings)})


def small_model(name: str, is_wider: bool = False) -> PreTrainedModel:
    """
    A random model with the config of this name, see `small_config`.

    Raises:
        ValueError: it is not small.
        Exception: whatever a config or a model of transformers raises for these sizes.
    """
    config = small_config(name, is_wider)
    with torch.device("meta"):
        size = sum(weights.numel() for weights in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are too many.")
    return random_model(config)
