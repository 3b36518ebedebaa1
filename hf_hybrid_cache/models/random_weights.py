"""The shape of Llama 3.2-1B with random weights: good for speed and memory, not for text."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

INIT_STD = 0.02  # initializer_range of the Llama family
INIT_CHUNK = 1 << 20  # weights per random generator, so that threads can share the work and the result not depend on it


def random_llama(
    config: LlamaConfig, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0
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
        bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=eos[0] if isinstance(eos, list) else eos
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
