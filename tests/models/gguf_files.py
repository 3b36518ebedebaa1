"""Small models as GGUF files, in the layout and with the names that GGUF uses."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel


def write_gguf(path: Path, model: PreTrainedModel, is_quantized: bool = False, **settings: Any) -> None:
    """Write a Llama, in full precision or with its matrices in 8 bits; settings are methods `add_...` of the writer."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    for name, value in (sizes | settings).items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    in_8_bits = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_coded = is_quantized and tensor.ndim == 2
        data = gguf.quantize(tensor.numpy(), in_8_bits) if is_coded else tensor.numpy()
        kind = in_8_bits if is_coded else None
        writer.add_tensor(names.get_name(name, try_suffixes=[".weight"]), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
