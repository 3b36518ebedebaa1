"""A model whose steps are fused beside a copy that runs its own forward, each with a cache."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, minmax, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.decode_step import FusedDecode, fuse_decode
from hf_hybrid_cache.layers import HybridLayer

from models.tiny_models import COMMON, random_prompt

SIZES = {**COMMON, "num_hidden_layers": 2}
_WINDOWS = {"sliding_window": 80, "layer_types": ["sliding_attention", "full_attention"]}
# Each has something that those before it have not.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "Mistral": lambda: MistralConfig(**SIZES, sliding_window=80),  # windows alone
    "Qwen2": lambda: Qwen2Config(**SIZES),
    "Qwen3": lambda: Qwen3Config(**SIZES),  # norms of heads
    "SmolLM3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "Gemma2": lambda: Gemma2Config(**SIZES, **_WINDOWS, query_pre_attn_scalar=16),  # soft caps
    "Gemma3": lambda: Gemma3TextConfig(**SIZES, **_WINDOWS, query_pre_attn_scalar=16),  # angles of two kinds
    "GptOss": lambda: GptOssConfig(**SIZES, **_WINDOWS, num_local_experts=4, num_experts_per_tok=2),  # sinks, experts
    "Qwen3Moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "Phi3": lambda: Phi3Config(**SIZES, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
    "Granite": lambda: GraniteConfig(**SIZES, attention_multiplier=0.3, residual_multiplier=0.5),
    "Olmo2": lambda: Olmo2Config(**SIZES),  # norms after
    "Cohere": lambda: CohereConfig(**SIZES),  # attention and gates side by side
    "Glm": lambda: GlmConfig(**SIZES),  # a half of each head is rotated
    "GPTNeoX": lambda: GPTNeoXConfig(**SIZES),  # means are subtracted in norms
}
CACHES: dict[str, Callable[[Any], HybridCache]] = {
    "full precision": DynamicHybridCache,
    "8 bits": lambda config: QuantizedHybridCache(config, bits=8),
    "4 bits": lambda config: QuantizedHybridCache(config, bits=4),
    "4 bits, not rotated": lambda config: HybridCache(config, codec=minmax(4, rotate=False)),
    "2 bits, not rotated": lambda config: HybridCache(config, codec=minmax(2, rotate=False)),
}
MAY_END_FUSING = "a layer of the cache chooses its codec"
FIRST_STEP = "more than 16 tokens come at once"


def made(config: PreTrainedConfig | None = None, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES), **settings).eval()


def made_at_random(
    family: str = "Llama", dtype: torch.dtype = torch.float32, bits: int | None = None, **settings: Any
) -> Any:
    """Make a model whose norms and biases are random, too."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.update(settings)
    model = made(config, dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    if bits is not None:
        quantize_weights(model, bits=bits)
    return model


class Twins:
    """A model whose steps are fused, a copy with its own forward, and a cache of each."""

    def __init__(self, model: Any, make: Callable[[Any], HybridCache] = DynamicHybridCache, tolerance: float = 1e-4):
        self.own_model = copy.deepcopy(model)
        self.model, self.fused, self.tolerance = model, fuse_decode(model), tolerance
        self.ours, self.own = make(model.config), make(model.config)

    @torch.no_grad()
    def forward(self, *ids: torch.Tensor, **options: Any) -> None:
        """Run both, which give the same logits."""
        ours = self.model(*ids, **cache_argument(self.ours), **options)
        own = self.own_model(*ids, **cache_argument(self.own), **options)
        assert type(ours) is type(own)
        apart = (ours[0] - own[0]).abs().max() / own[0].abs().max()
        assert apart <= self.tolerance, f"{apart:.1e} apart after {self.own.get_seq_length()} tokens"

    def steps(self, number: int, seed: int = 0) -> int:
        """Run steps with random tokens; return how many ran in one call."""
        before, layer = self.fused.fused_steps, self.own.layers[0]
        rows = layer.batch if isinstance(layer, HybridLayer) else layer.keys.shape[0]
        for token in random_prompt(rows, number, seed).split(1, dim=1):
            self.forward(token)
        return self.fused.fused_steps - before

    def hold_the_same(self) -> bool:
        """Whether both caches hold the same, but for some codes next to a border between two."""
        lengths = {layer.get_seq_length() for cache in (self.ours, self.own) for layer in cache.layers}
        for ours, own in zip(copy.deepcopy(self.ours).layers, copy.deepcopy(self.own).layers, strict=True):
            if lengths != {0}:
                for mine, theirs in ((ours.keys, own.keys), (ours.values, own.values)):
                    scale = theirs.float().abs().max()
                    far = (mine.float() - theirs.float()).abs() > self.tolerance * scale
                    if mine.shape != theirs.shape or far.float().mean() > 0.01:
                        return False
        return len(lengths) == 1


def only_packs(fused: FusedDecode) -> bool:
    """Whether no step ran by the model's own forward but those that must."""
    return set(fused.other_passes) <= {MAY_END_FUSING, FIRST_STEP}
