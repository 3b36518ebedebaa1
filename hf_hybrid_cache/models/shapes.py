"""
Shapes of common models by their names on the Hub, so that their costs are known without a network.

A shape is a config that says what sizes and speeds depend on; it is not for loading weights. Facts are those of the
models' own `config.json`, but for how weights are quantized: gpt-oss and DeepSeek-V3 are here in bfloat16.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _config(kind: str, **sizes: Any) -> "PreTrainedConfig":
    # Imported by name: listing the shapes then needs no transformers, which takes seconds to import.
    config: PreTrainedConfig = getattr(import_module("transformers"), kind)(**deepcopy(sizes))
    return config


def _shape(
    kind: str, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int,
    kv_heads: int, head_dim: int, context: int, is_tied: bool, **more: Any,
) -> "Callable[[], PreTrainedConfig]":  # fmt: skip
    return partial(
        _config, kind, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=context, tie_word_embeddings=is_tied, pad_token_id=None, **more,
    )  # fmt: skip


_LLAMA_1B = _shape(
    "LlamaConfig", 128_256, 2048, 8192, 16, 32, 8, 64, 131_072, True,
    rms_norm_eps=1e-5, bos_token_id=128_000, eos_token_id=[128_001, 128_008, 128_009],
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
_LLAMA_3B = _shape("LlamaConfig", 128_256, 3072, 8192, 28, 24, 8, 128, 131_072, True)
_LLAMA_8B = _shape("LlamaConfig", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, False)
_LLAMA_70B = _shape("LlamaConfig", 128_256, 8192, 28_672, 80, 64, 8, 128, 131_072, False)
_SMOLLM2_135M = _shape("LlamaConfig", 49_152, 576, 1536, 30, 9, 3, 64, 8192, True)
_MISTRAL_7B = _shape("MistralConfig", 32_768, 4096, 14_336, 32, 32, 8, 128, 32_768, False, sliding_window=None)
_GEMMA3_1B = _shape("Gemma3TextConfig", 262_144, 1152, 6912, 26, 4, 1, 256, 32_768, True, sliding_window=512)
_OLMOE = _shape("OlmoeConfig", 50_304, 2048, 1024, 16, 16, 16, 128, 4096, False, num_experts=64, num_experts_per_tok=8)
_QWEN3_30B_A3B = partial(_shape, "Qwen3MoeConfig", 151_936, 2048, 6144, 48, 32, 4, 128)
_OF_128 = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_GPT_OSS_20B = _shape(
    "GptOssConfig", 201_088, 2880, 2880, 24, 64, 8, 64, 131_072, False,
    sliding_window=128, num_local_experts=32, num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
# Other sizes are the config's defaults, which are those of this model.
_DEEPSEEK_V3 = partial(
    _config, "DeepseekV3Config", max_position_embeddings=163_840, quantization_config={"quant_method": "fp8"}
)

SHAPES: "dict[str, Callable[[], PreTrainedConfig]]" = {
    "meta-llama/Llama-3.2-1B": _LLAMA_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_1B,
    "meta-llama/Llama-3.2-3B": _LLAMA_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3B,
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen/Qwen3-0.6B": _shape("Qwen3Config", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, True),
    "Qwen/Qwen3-1.7B": _shape("Qwen3Config", 151_936, 2048, 6144, 28, 16, 8, 128, 40_960, True),
    "Qwen/Qwen3-4B": _shape("Qwen3Config", 151_936, 2560, 9728, 36, 32, 8, 128, 40_960, True),
    "Qwen/Qwen3-8B": _shape("Qwen3Config", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960, False),
    "Qwen/Qwen3-14B": _shape("Qwen3Config", 151_936, 5120, 17_408, 40, 40, 8, 128, 40_960, False),
    "Qwen/Qwen3-32B": _shape("Qwen3Config", 151_936, 5120, 25_600, 64, 64, 8, 128, 40_960, False),
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B(40_960, False, **_OF_128),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B_A3B(262_144, False, **_OF_128),
    "allenai/OLMoE-1B-7B-0924": _OLMOE,
    "allenai/OLMoE-1B-7B-0924-Instruct": _OLMOE,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
    "google/gemma-3-1b-pt": _GEMMA3_1B,
    "google/gemma-3-1b-it": _GEMMA3_1B,
    "microsoft/Phi-4-mini-instruct": _shape(
        "Phi3Config", 200_064, 3072, 8192, 32, 24, 8, 128, 131_072, True, sliding_window=262_144
    ),
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
}

# The names that `load` knows beside those of the Hub; the second model comes from no file.
SMOLLM2, CREATED_MODEL = "smollm2-135m", "llama-3.2-1b-random"
ALIASES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct", CREATED_MODEL: "meta-llama/Llama-3.2-1B"}
