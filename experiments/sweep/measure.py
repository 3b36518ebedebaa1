"""
Measures one cell, in a process of its own: `python -m experiments.sweep.measure CELL OUT [GPU_BYTES]`.

CELL is a `Cell` as JSON, OUT the file that the result is written to, also as JSON. Memory that does not suffice is a
result.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, bus_bandwidth
from experiments.common.decoding import weight_bytes
from experiments.common.synthetic import fill
from experiments.quality.quality_caches import stored_bytes
from experiments.sweep.caches import CACHES, CPU, make_cache
from experiments.sweep.cell import Cell
from experiments.sweep.memory import PeakMemory, out_of_memory
from hf_hybrid_cache import DecodeOnCPU, HybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load
from hf_hybrid_cache.planning import default_chunk, model_cost

FILL_CHUNK = 8192
WARM_UP_TOKENS = 256  # some of them are quantized, so that all kernels are compiled
READER_MIB = 512


class TokenClock(BaseStreamer):
    """Records the time of each new token; reading a token waits for the device."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # `generate` hands it over first
            self._is_prompt = False
            return
        value.tolist()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: PreTrainedModel, cache: Cache, cell: Cell, ids: torch.Tensor, new_tokens: int) -> list[float]:
    """Seconds from the call to each new token."""
    clock = TokenClock()
    moves = cell.decode_device == CPU and model.device.type != "cpu"
    decoding = DecodeOnCPU(weights=CACHES[cell.cache].weights)
    start = time.perf_counter()
    model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(cache),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=[],  # random weights may come to one
        prefill_chunk_size=prefill_chunk(model, cell),
        streamer=clock,
        **({"custom_generate": decoding} if moves else {}),
    )
    return [moment - start for moment in clock.times]


def prefill_chunk(model: PreTrainedModel, cell: Cell) -> int | None:
    """Return the tokens of a forward pass of the prompt: few on a GPU, the fastest number on a CPU; `None` for all."""
    on_gpu = model.device.type != "cpu"
    return None if cell.cache == "stock" and not on_gpu else default_chunk(on_gpu)


def random_ids(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        model.config.get_text_config(decoder=True).vocab_size, (1, num_tokens), generator=generator
    ).to(model.device)


@torch.inference_mode()
def decode(model: PreTrainedModel, cell: Cell) -> dict[str, Any]:
    """Prefill and decode once; seconds and bytes."""
    warm_up = make_cache(cell.cache, model.config, cell.decode_device)
    generate(model, warm_up, cell, random_ids(model, WARM_UP_TOKENS), 2)
    del warm_up
    peaks = PeakMemory()
    cache = make_cache(cell.cache, model.config, cell.decode_device)
    if cell.prefill == "synthetic":
        tokens = cell.prompt_tokens - 1
        chunk = tokens if CACHES[cell.cache].codes_all_anew else FILL_CHUNK
        fill(cache, model.config, tokens, model.dtype, str(model.device), chunk)
    times = generate(model, cache, cell, random_ids(model, cell.prompt_tokens), cell.new_tokens)
    steps = np.diff(times)
    assert len(times) == cell.new_tokens
    return {
        "ttft_seconds": times[0] if cell.prefill == "real" else None,
        "step_seconds": steps.tolist(),
        "tokens_per_second": 1 / float(steps.mean()),
        "tpot_seconds": {"mean": float(steps.mean())}
        | {f"p{share}": float(np.percentile(steps, share)) for share in (50, 95, 99)},
        "peak_bytes": peaks.report(),
        "kv_bytes": stored_bytes(cache),
        "memory": asdict(cache.memory()) if isinstance(cache, HybridCache) else None,
        "moved": asdict(cache.stats) if isinstance(cache, HybridCache) else None,
        "weight_bytes": read_weight_bytes(model, CACHES[cell.cache].weights),
    }


def read_weight_bytes(model: PreTrainedModel, bits: int | None) -> int:
    """Return the bytes of weights that a token reads, as they are or quantized."""
    if bits is None:
        return weight_bytes(model)
    return model_cost(model.config, model.dtype).quantized_weights[bits].step_bytes


def measure(cell: Cell, gpu_bytes: int | None = None) -> dict[str, Any]:
    """The result, with the environment it was measured in; `gpu_bytes` is all that may be used of the GPU's memory."""
    if gpu_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(gpu_bytes / torch.cuda.get_device_properties(0).total_memory)
    environment = records.environment() | {
        "gpu_memory_limit_bytes": gpu_bytes,
        "read_bytes_per_second": read_rate(),
        "bus_bytes_per_second": bus_bandwidth() if torch.cuda.is_available() else None,
    }
    try:
        model, _ = load(cell.model)
        bits = CACHES[cell.cache].weights
        if bits is not None and model.device.type == "cpu":
            quantize_weights(model, bits)
        result = {"status": "measured", **decode(model, cell)}
    except (MemoryError, RuntimeError) as error:
        shortage = out_of_memory(error)
        if shortage is None:
            raise
        result = {"status": "out of memory", **shortage}
    return {"result": result, "environment": environment}


def read_rate() -> float:
    reader = MemoryReader(READER_MIB)
    for _ in range(5):
        reader.read()
    rate: float = reader.report()["bytes_per_second"]
    return rate


if __name__ == "__main__":
    found = measure(Cell(**json.loads(sys.argv[1])), int(sys.argv[3]) if len(sys.argv) > 3 else None)
    Path(sys.argv[2]).write_text(json.dumps(found))
