"""
`generate` with the KV cache that fits: `model.generate(..., custom_generate=..., trust_remote_code=True)`.

transformers loads this file by the name of the repository, or of the folder, that holds `custom_generate/`.
"""

from contextlib import nullcontext
from typing import Any

import torch

import hf_hybrid_cache
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument, passed_cache
from hf_hybrid_cache.planning import default_chunk

NEW_TOKENS = 20  # transformers' default
INSTEAD = "or call generate without custom_generate."


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    generation_config: Any = None,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    **kwargs: Any,
) -> Any:
    """
    Generate with the cache that `cache_for_budget` makes; everything else is as in `model.generate`.

    Args:
        model: a decoder-only model, on the CPU or on a GPU.
        inputs: the prompt, `[sequences, tokens]`.
        generation_config: as of `generate`.
        gpu_memory: for weights, cache and all, in bytes or as text such as "8GiB"; `None` for what is free now beside
            the weights. With a model on the CPU it is not used.
        host_memory: likewise.
        **kwargs: of `generate`. The prompt is computed in chunks of 2,048 tokens on a CPU and of 512 on a GPU, unless
            `prefill_chunk_size` says otherwise.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: nothing fits, and the message says what is short and which context would fit; or an option asks for
            another cache, or for none.
    """

    def option(name: str) -> Any:
        """Return an option as `generate` does: from its arguments, its generation config, or the model's."""
        given = (kwargs.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name, None))
        return next((value for value in given if value is not None), None)

    if passed_cache(kwargs) is not None:
        raise ValueError(
            f"This generation method makes the cache itself. Leave out {CACHE_ARGUMENT}, {INSTEAD} The latter goes on "
            "from a cache that is filled."
        )
    # "hybrid" is in configs of older models, and means nothing any more.
    if option("use_cache") is False or option("cache_implementation") not in (None, "hybrid"):
        raise ValueError(
            f"This generation method makes the cache itself. Leave out use_cache and cache_implementation, {INSTEAD}"
        )

    prompts = (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
    prompt = next((each for each in prompts if each is not None), None)
    batch, prompt_tokens = (1, 1) if prompt is None else prompt.shape[:2]
    if (new_tokens := option("max_new_tokens")) is not None:
        context = prompt_tokens + new_tokens
    else:
        context = option("max_length") or prompt_tokens + NEW_TOKENS
    # Longer ones are up to `generate`, which warns of them.
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or context
    device, gpu_memory = _device_of(model, gpu_memory)
    chunk = option("prefill_chunk_size") or default_chunk(on_gpu=device.type != "cpu")
    if kwargs.get("inputs_embeds") is not None:
        chunk = prompt_tokens  # embeddings are computed at once
    else:
        kwargs["prefill_chunk_size"] = chunk

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        cache = hf_hybrid_cache.cache_for_budget(
            model.config,
            min(max(context, prompt_tokens), longest),
            gpu_memory,
            host_memory,
            batch_size=batch * max(option("num_beams") or 1, option("num_return_sequences") or 1),
            prefill_chunk_size=min(chunk, prompt_tokens),
        )
    # Not the method of `model`, which transformers sets to this function where the model's own repository holds it.
    return type(model).generate(model, inputs, generation_config=generation_config, **kwargs | cache_argument(cache))


def _device_of(model: Any, gpu_memory: int | str | None) -> tuple[torch.device, int | str | None]:
    """Return the device of the model, and its memory as `cache_for_budget` takes it."""
    devices = {weight.device for weight in model.parameters()} - {torch.device("cpu"), torch.device("meta")}
    if not devices:
        return torch.device("cpu"), 0
    if gpu_memory is None and (len(devices) > 1 or {device.type for device in devices} != {"cuda"}):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"How much memory is free is known of one CUDA device, and the model is on {names}. "
            'Pass gpu_memory="8GiB", say, to generate: for weights, cache and all.'
        )
    return next(iter(devices)), gpu_memory
