"""
Experts in host memory, all else of a mixture-of-experts model on the device: a decode step, and a prompt.

Against accelerate's offload, which brings all experts of a layer to the device whenever the layer is used, and the
model that is on the device as a whole, where it fits. Random weights, in a real shape cut to a few layers; all take
turns, and every step is of another random token.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import cpu_offload
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.cache_utils import Cache

from experiments.common import records
from experiments.common.synthetic import fill
from experiments.common.timing import medians, samples_in_turns
from experiments.experts.random_experts import cut_config, expert_names, random_model, twin_of
from experiments.gpu.machine import allocated, device, gpu_parser, parsed, seconds_on_device
from experiments.sweep.memory import out_of_memory
from hf_hybrid_cache import DynamicHybridCache, move_experts_to_host
from hf_hybrid_cache.cache_argument import cache_argument

MODEL = "Qwen/Qwen3-30B-A3B"
DTYPE = torch.bfloat16
WHOLE, ACCELERATE = "all on the device", "accelerate"
# Bits of the experts.
OURS: dict[str, int | None] = {"ours": None, "ours-8": 8, "ours-4": 4}


def config_of(is_rehearsal: bool, layers: int) -> PreTrainedConfig:
    if not is_rehearsal:
        return cut_config(MODEL, layers)
    return Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip


def offloaded_by_accelerate(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose experts accelerate brings to the device when they are used, all of a layer."""
    twin = twin_of(model)
    for name in expert_names(twin):
        cpu_offload(twin.get_submodule(name), execution_device=torch.device(device()))
    for name, weight in twin.named_parameters():
        if not any(name.startswith(experts) for experts in expert_names(twin)):
            weight.data = weight.data.to(device())
    for buffer in twin.buffers():
        buffer.data = buffer.data.to(device())
    return twin


def with_experts_in_host_memory(model: PreTrainedModel, bits: int | None) -> PreTrainedModel:
    twin = twin_of(model)
    move_experts_to_host(twin, bits)
    return twin.to(device())  # type: ignore[arg-type]


def forms_of(model: PreTrainedModel) -> tuple[dict[str, PreTrainedModel], dict[str, int], dict[str, Any]]:
    """Ways to run a model that is in host memory, the bytes of the device that each takes, and what does not fit."""
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        **{name: partial(with_experts_in_host_memory, model, bits) for name, bits in OURS.items()},
        ACCELERATE: partial(offloaded_by_accelerate, model),
        WHOLE: lambda: random_model(model.config, DTYPE).to(device()),  # type: ignore[arg-type]
    }
    forms, held, left_out = {}, {}, {}
    for name, make in makers.items():
        before = allocated()
        try:
            forms[name] = make()
        except (MemoryError, RuntimeError) as error:
            shortage = out_of_memory(error)
            if shortage is None:
                raise
            left_out[name] = shortage
        else:
            held[name] = allocated() - before
    return forms, held, left_out


@torch.inference_mode()
def measure(forms: dict[str, PreTrainedModel], num_tokens: int, context: int, rounds: int) -> dict[str, Any]:
    """A cell: `num_tokens` at once after `context` others; raw samples in seconds."""
    config = next(iter(forms.values())).config
    caches: dict[str, Cache] = {}

    def run(name: str) -> float:
        ids = torch.randint(config.vocab_size, (1, num_tokens)).to(device())
        return seconds_on_device(lambda: forms[name](ids, **cache_argument(caches[name]), logits_to_keep=1))

    def before(name: str) -> None:
        caches[name] = DynamicHybridCache(config, cpu_decode=False)
        fill(caches[name], config, context, DTYPE, device())
        if num_tokens == 1:
            run(name)

    samples = samples_in_turns({name: partial(run, name) for name in forms}, rounds, before)
    seconds = medians(samples)
    return {
        "tokens": num_tokens,
        "context_tokens": context,
        "median_seconds": seconds,
        "accelerate_over": {name: seconds[ACCELERATE] / value for name, value in seconds.items()},
        "samples_seconds": samples,
    }


def main() -> None:
    parser = gpu_parser("experts", __doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    given = parsed(parser)
    model = random_model(config_of(given.rehearse, given.layers), DTYPE)
    forms, held, left_out = forms_of(model)
    record: dict[str, Any] = {
        "model": MODEL,
        "layers": model.config.num_hidden_layers,
        "rehearsal": given.rehearse,
        "device_bytes": held,
        "left_out": left_out,
        "cells": [],
    }
    for num_tokens, context in ((1, given.context), *((prompt, 0) for prompt in given.prompts)):
        record["cells"].append(measure(forms, num_tokens, context, given.rounds))
        path = records.save("gpu/experts", record, given.out)
    print(f"record: {path}")
    print(json.dumps({cell["tokens"]: cell["accelerate_over"] for cell in record["cells"]}))


if __name__ == "__main__":
    main()
