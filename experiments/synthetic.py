"""A cache filled with random keys and values, as a stand-in for a prefill that would take too long."""

import torch
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from hf_hybrid_cache.models import llama_3_2_1b_config


def llama_1b_config(num_layers: int = 16) -> LlamaConfig:
    """The shape of Llama-3.2-1B, with fewer layers where one tells as much."""
    config = llama_3_2_1b_config()
    config.num_hidden_layers = num_layers
    return config


def random_states(config: LlamaConfig, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """States of one layer and one sequence, `[1, num_kv_heads, num_tokens, head_dim]`."""
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    return torch.randn(1, config.num_key_value_heads, num_tokens, config.head_dim, device=device).to(dtype)


def fill(
    cache: Cache, config: LlamaConfig, num_tokens: int, dtype: torch.dtype, device: str = "cpu", chunk: int = 2048
) -> None:
    """Append `num_tokens` random tokens to every layer, `chunk` at a time, as a chunked prefill would."""
    torch.manual_seed(0)
    for start in range(0, num_tokens, chunk):
        states = random_states(config, min(chunk, num_tokens - start), dtype, device)
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
