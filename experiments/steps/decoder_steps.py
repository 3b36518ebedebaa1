"""
A decode step of the decoders that people run, in one call against the model's own forward: milliseconds, in turns.

Real shapes with random weights in 4 bits, of large models the first layers with a part of the vocabulary. Both are the
same weights with caches of the same random states. A timed step follows an untimed one of the same cache, as in
decoding; greedy tokens of both are compared.
"""

from collections.abc import Callable

import torch
from transformers import Gemma3TextConfig, GraniteConfig, Olmo2Config, Phi3Config, PreTrainedConfig

from experiments.common.bandwidth import MemoryReader
from experiments.common.decoding import GreedyDecoder
from experiments.common.harness import Cell, cold_turns, publish_all
from experiments.common.options import experiment_parser
from experiments.common.synthetic import filled_cache
from experiments.experts.random_experts import cut_config, random_model, twin_of
from hf_hybrid_cache import DynamicHybridCache, UnknownStepError, fuse_decode, get_num_threads, quantize_weights
from hf_hybrid_cache.models import load_config

# Sizes are those of each model's config.json; only what sizes and order of operations depend on is here.
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "smollm2-135m": lambda: load_config("HuggingFaceTB/SmolLM2-135M"),
    "llama-3.2-1b": lambda: load_config("meta-llama/Llama-3.2-1B"),
    "gemma-3-270m": lambda: Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256,
    ),
    "gpt-oss-20b, 4 layers": lambda: cut_config("openai/gpt-oss-20b", 4),
    "qwen3-30b-a3b, 4 layers": lambda: cut_config("Qwen/Qwen3-30B-A3B", 4),
    "phi-4-mini, 8 layers": lambda: Phi3Config(
        vocab_size=50_016, hidden_size=3072, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=24,
        num_key_value_heads=8, sliding_window=None, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    ),
    "granite-3.3-2b, 10 layers": lambda: GraniteConfig(
        vocab_size=12_290, hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, num_attention_heads=32,
        num_key_value_heads=8, embedding_multiplier=12.0, attention_multiplier=0.015625, residual_multiplier=0.22,
        logits_scaling=8.0, tie_word_embeddings=True, max_position_embeddings=131_072,
    ),
    "olmo-2-1b": lambda: Olmo2Config(
        vocab_size=100_352, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=4096, pad_token_id=None,
    ),
}  # fmt: skip


def measure(name: str, num_tokens: int, bits: int, rounds: int, reader: MemoryReader) -> Cell:
    """A cell: raw samples in seconds, and how many times as fast a step in one call is."""
    model = random_model(SHAPES[name](), torch.bfloat16)
    quantize_weights(model, bits, head_bits=bits)
    fused = twin_of(model)
    try:
        steps = fuse_decode(fused)
    except UnknownStepError as error:
        return {"model": name, "why_not": error.why, "times_as_fast": 1.0}
    decoders = {
        way: GreedyDecoder(each, filled_cache(DynamicHybridCache, each, num_tokens), 1)
        for way, each in {"own forward": model, "one call": fused}.items()
    }
    reader.forget()
    cell = cold_turns({way: decoder.step for way, decoder in decoders.items()}, rounds, reader)
    seconds = cell["median_seconds"]
    return {
        "model": name,
        "tokens": num_tokens,
        "times_as_fast": seconds["own forward"] / seconds["one call"],
        "fused_steps": steps.fused_steps,
        "same_tokens": decoders["own forward"].tokens == decoders["one call"].tokens,
        **cell,
    }


def main() -> None:
    parser = experiment_parser("decoder_steps", __doc__)
    parser.add_argument(
        "--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="MODEL", help=", ".join(SHAPES)
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--bits", type=int, choices=[8, 4], default=4, help="of the weights")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    publish_all(
        "decoder_steps", arguments, measure, (arguments.models, [arguments.tokens], [arguments.bits]),
        lambda cell: cell["times_as_fast"], weight_bits=arguments.bits, threads=get_num_threads(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
