"""
Device memory at its peak: while a long prompt is read into an offloaded cache, and while the CPU decodes.

The prompt goes in chunks of 512 into `OffloadedHybridCache`. Its peak is held against weights, keys and values of two
layers, and activations, which are what the same prompt takes beside weights and keys and values with
`DynamicHybridCache`. Then `DecodeOnCPU` decodes, and what is still allocated on the device is noted at every token.
"""

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.synthetic import kv_bytes
from experiments.common.timing import seconds_of
from experiments.gpu.machine import allocated, gpu_parser, has_gpu, model_of, parsed
from experiments.sweep.memory import out_of_memory
from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache, OffloadedHybridCache
from hf_hybrid_cache.cache_argument import cache_argument

CHUNK, LAYERS_AHEAD = 512, 2
OFFLOADED, RESIDENT = "offloaded", "dynamic"


def prompt(model: LlamaForCausalLM, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, num_tokens), generator=generator).to(model.device)


def peak_of_prefill(model: LlamaForCausalLM, make: Callable[[], Cache], ids: torch.Tensor) -> dict[str, Any]:
    """Bytes of the device in use at most, weights and all, and seconds; or why it did not fit."""
    gc.collect()
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    try:
        # Reading the result waits for the device.
        seconds = seconds_of(lambda: prefill(model, make(), ids, CHUNK).tolist())
    except (MemoryError, RuntimeError) as error:
        shortage = out_of_memory(error)
        if shortage is None:
            raise
        return shortage
    return {"peak_bytes": torch.cuda.max_memory_allocated() if has_gpu() else None, "seconds": seconds}


@torch.inference_mode()
def prefills(model: LlamaForCausalLM, num_tokens: int) -> dict[str, Any]:
    """Compare the peaks of both caches, and the offloaded one's with the expected peak."""
    ids, config = prompt(model, num_tokens), model.config
    weights, kept = allocated(), kv_bytes(config, num_tokens, torch.bfloat16)
    found = {
        # All of the context at once, so that growing adds nothing to its peak.
        RESIDENT: peak_of_prefill(model, lambda: DynamicHybridCache(config, num_tokens, cpu_decode=False), ids),
        OFFLOADED: peak_of_prefill(model, lambda: OffloadedHybridCache(config, cpu_decode=False), ids),
    }
    resident, offloaded = (found[name].get("peak_bytes") for name in (RESIDENT, OFFLOADED))
    record: dict[str, Any] = {"context_tokens": num_tokens, "weight_bytes": weights, "kv_bytes": kept, "caches": found}
    if resident is not None and offloaded is not None:
        activations = resident - weights - kept
        expected = weights + kept * LAYERS_AHEAD // config.num_hidden_layers + activations
        record |= {
            "activation_bytes": activations,
            "expected_bytes": expected,
            "above_expected": offloaded / expected - 1,
        }
    return record


class DeviceMemory(BaseStreamer):
    """Records the device memory in use, and reserved, at each new token."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.reserved: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.allocated.append(allocated())
        self.reserved.append(torch.cuda.memory_reserved() if has_gpu() else 0)

    def end(self) -> None:
        pass


def decoding_on_cpu(model: LlamaForCausalLM, num_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Record the device memory in use while the CPU decodes after a prefill on the device."""
    gc.collect()
    ids, memory = prompt(model, num_tokens), DeviceMemory()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(DynamicHybridCache(model.config)),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=[],
        prefill_chunk_size=CHUNK,
        custom_generate=DecodeOnCPU(),
        streamer=memory,
    )
    # The first is the prompt, handed over before anything is computed.
    return {
        "context_tokens": num_tokens,
        "allocated_bytes": max(memory.allocated[1:]) if has_gpu() else None,
        "reserved_bytes": max(memory.reserved[1:]) if has_gpu() else None,
    }


def main() -> None:
    parser = gpu_parser("peaks", __doc__)
    parser.add_argument("--context", type=int, default=131_072, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument(
        "--decoded-context", type=int, default=32_768, help="likewise, before the CPU decodes (default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=8)
    given = parsed(parser)
    model = model_of(given.rehearse)
    record: dict[str, Any] = {"model": "llama-3.2-1b-random", "rehearsal": given.rehearse, "chunk_tokens": CHUNK}
    record["decode_on_cpu"] = decoding_on_cpu(model, given.decoded_context, given.new_tokens)
    path = records.save("gpu/peaks", record, given.out)
    record["prefill"] = prefills(model, given.context)
    path = records.save("gpu/peaks", record, given.out)
    print(f"record: {path}")
    shown = {"above_expected": record["prefill"].get("above_expected"), **record["decode_on_cpu"]}
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
