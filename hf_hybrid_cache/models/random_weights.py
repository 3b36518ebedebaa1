"""The shape of Llama 3.2-1B with random weights: good for speed and memory, not for text."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .source import Device, Loaded, ModelLoadError, Quantization

INIT_STD = 0.02  # initializer_range of the Llama family
INIT_CHUNK = 1 << 20  # weights per random generator, so that threads can share the work and the result not depend on it


def load_llama_3_2_1b_random(
    name: str, dtype: torch.dtype | None, device_map: Device, quantization_config: Quantization
) -> Loaded:
    """Create it; see `hf_hybrid_cache.models.load`."""
    if device_map == "auto":
        raise ModelLoadError(f'{name} is created on one device: pass device_map="cpu" or "cuda", not "auto".')
    if quantization_config is not None:
        raise ModelLoadError(
            f"{name} is created, not read from files: drop quantization_config, and use quantize_weights(model, 4)."
        )
    # 128004 is Llama 3's own padding token, <|finetune_right_pad_id|>
    return random_llama(llama_3_2_1b_config(), dtype or torch.bfloat16, device_map, pad_token_id=128_004), None


def llama_3_2_1b_config() -> LlamaConfig:
    """The configuration of Llama-3.2-1B-Instruct: 1.24 billion weights, 32 KiB of bfloat16 KV a token."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_id=[128_001, 128_008, 128_009],
    )


def random_llama(
    config: LlamaConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
    seed: int = 0,
    pad_token_id: int | None = None,
) -> LlamaForCausalLM:
    """
    Create a Llama with random weights in `dtype` on `device`, without a second copy of them anywhere.

    Matrices and embeddings are normal with standard deviation 0.02, norms are one. The weights depend on the seed
    alone, not on the device or the number of threads; another dtype gives the same weights rounded to it.

    Args:
        config: any Llama shape; tied embeddings stay tied.
        dtype: of the weights. The rotary frequencies stay float32, as `from_pretrained` leaves them.
        device: where the weights are created.
        seed: non-negative.
        pad_token_id: for the generation config; None means the first end-of-text token.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # to_empty() leaves its buffers undefined
    if config.tie_word_embeddings:
        model.tie_weights()
    else:
        model.lm_head.to_empty(device=device)
    _fill_normal((weight.detach() for weight in model.parameters() if weight.ndim > 1), seed)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.detach().fill_(1.0)
    eos = config.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=eos,
        pad_token_id=pad_token_id if pad_token_id is not None else eos[0] if isinstance(eos, list) else eos,
    )
    return model.eval()


def _fill_normal(weights: Iterable[torch.Tensor], seed: int) -> None:
    """Fill each tensor in place, chunk by chunk; torch draws normal numbers on one thread per call."""

    def fill(index: int, chunk: torch.Tensor) -> None:
        # torch keeps 32 bits of a seed: multiply by an odd constant, so that no two seeds below 2**32 share all chunks
        generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + index) % 2**32)
        chunk.copy_(torch.empty(chunk.numel()).normal_(0.0, INIT_STD, generator=generator))

    chunks = [chunk for weight in weights for chunk in weight.view(-1).split(INIT_CHUNK)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill, range(len(chunks)), chunks):
            pass
