"""A Llama, or a Qwen3 with experts, as a file of llama.cpp, its matrices in 16, 8 or 4 bits; written once and kept."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from filelock import FileLock
from transformers import PreTrainedModel

from experiments.peers.llama_cpp import quantize
from hf_hybrid_cache.system.user_folder import cache_home

FOLDER = "gguf-v1"  # the version counts changes of what is written
FILE_TYPES = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
# Names of transformers, and of files.
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
LAYER_TENSORS = {
    "llama": _ATTENTION | {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    "qwen3_moe": _ATTENTION | _NORMS | {"mlp.gate": "ffn_gate_inp"},
}
ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}


def gguf_file(name: str, bits: int, model: PreTrainedModel, tokens_of: Path | None = None) -> Path:
    """
    A model's file with weights of so many bits, quantized by llama.cpp; made if there is none of that name yet.

    It has the tokenizer of another file, or none.
    """
    folder = cache_home() / FOLDER
    path = folder / f"{name}.{FILE_TYPES[bits]}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if not path.is_file():
            whole, partial = (folder / f"{name}.{end}.partial" for end in ("bf16", FILE_TYPES[bits]))
            try:
                write_model(model, whole, tokens_of)
                if bits < 16:
                    quantize(whole, partial, FILE_TYPES[bits])
                (partial if bits < 16 else whole).rename(path)
            finally:
                whole.unlink(missing_ok=True)
                partial.unlink(missing_ok=True)
    return path


def write_model(model: PreTrainedModel, path: Path, tokens_of: Path | None = None) -> None:
    """Write a model: matrices in bfloat16, and the tokens of another file, or no more than their number."""
    config: Any = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokens_of is None:
        writer.add_tokenizer_model("none")
    else:
        for field in gguf.GGUFReader(tokens_of).fields.values():
            if field.name.startswith("tokenizer."):
                kind_of_items = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], kind_of_items)
    if kind == "qwen3_moe":
        assert config.norm_topk_prob  # llama.cpp takes this for granted
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    weights = model.state_dict()
    _add(writer, "token_embd", weights["model.embed_tokens.weight"])
    _add(writer, "output_norm", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        _add(writer, "output", weights["lm_head.weight"])
    if kind == "llama":
        _add(writer, "rope_freqs", _frequency_divisors(model))
    for layer in range(config.num_hidden_layers):
        for name, tensor in LAYER_TENSORS[kind].items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if kind == "llama" and tensor in ("attn_q", "attn_k"):
                weight = _neighbours(weight, config.head_dim)
            _add(writer, f"blk.{layer}.{tensor}", weight)
        if kind == "qwen3_moe":
            gate, up = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
            _add(writer, f"blk.{layer}.ffn_gate_exps", gate)
            _add(writer, f"blk.{layer}.ffn_up_exps", up)
            _add(writer, f"blk.{layer}.ffn_down_exps", weights[f"model.layers.{layer}.mlp.experts.down_proj"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    if weight.ndim == 1:
        writer.add_tensor(f"{name}.weight", weight.float().numpy())
    else:
        bits = weight.bfloat16().contiguous().view(torch.int16).numpy()
        writer.add_tensor(f"{name}.weight", bits.view(np.uint16), raw_dtype=gguf.GGMLQuantizationType.BF16)


def _neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of which the two that rotate together are neighbours; in transformers they are half a head apart."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _frequency_divisors(model: PreTrainedModel) -> torch.Tensor:
    """Return the divisors of the plain rotary frequencies in the model's RoPE scaling."""
    exponents = torch.arange(0, model.config.head_dim, 2) / model.config.head_dim
    return model.config.rope_parameters["rope_theta"] ** -exponents / model.get_buffer("model.rotary_emb.inv_freq")
