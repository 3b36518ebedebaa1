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
import psutil
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, bus_bandwidth, read_bandwidth
from experiments.common.decoding import weight_bytes
from experiments.common.synthetic import fill
from experiments.quality.quality_caches import stored_bytes
from experiments.sweep.caches import CACHES, CPU, make_cache
from experiments.sweep.store import Cell
from hf_hybrid_cache import DecodeOnCPU, HybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load
from hf_hybrid_cache.planning import default_chunk, model_cost

FILL_CHUNK = 8192
WARM_UP_TOKENS = 256  # some of them are quantized, so that all kernels are compiled
READER_MIB = 512
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Messages of torch's allocator.
_HOST = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


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
    read = weight_bytes(model)
    if bits is None:
        return read
    quantized = model_cost(model.config, model.dtype).quantized_weights[bits].num_bytes
    return round(quantized * read / sum(weight.nbytes for weight in model.parameters()))


def measure(cell: Cell, gpu_bytes: int | None = None) -> dict[str, Any]:
    """The result, with the environment it was measured in; `gpu_bytes` is all that may be used of the GPU's memory."""
    if gpu_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(gpu_bytes / torch.cuda.get_device_properties(0).total_memory)
    environment = records.environment() | {
        "gpu_memory_limit_bytes": gpu_bytes,
        "read_bytes_per_second": read_bandwidth(MemoryReader(READER_MIB)),
        "bus_bytes_per_second": bus_bandwidth() if torch.cuda.is_available() else None,
    }
    try:
        model, _ = load(cell.model)
        bits = CACHES[cell.cache].weights
        if bits is not None and model.device.type == "cpu":
            quantize_weights(model, bits)
        result = {"status": "measured", **decode(model, cell)}
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        result = {"status": "out of memory", "message": (str(error).splitlines() or [type(error).__name__])[0]}
    return {"result": result, "environment": environment}


class PeakMemory:
    """Measures the memory peaks of this process since the object was made."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # the highest RSS from now on
            self._before = _highest_rss()  # the same counter: others may differ by some pages for each thread
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def report(self) -> dict[str, int | None]:
        """
        Return the peaks in bytes.

        `host_over_model`: the highest RSS, less that of before; None where the system does not tell it. 0 where all of
            it fitted into what had been given back.
        `device_allocated`, `device_reserved`: by torch's allocator, all of the process; None without a GPU.
        """
        host = None
        if _STATUS.exists():
            host = max(0, _highest_rss() - self._before)  # threads count some pages late
        has_gpu = torch.cuda.is_available()
        return {
            "host_over_model": host,
            "device_allocated": torch.cuda.max_memory_allocated() if has_gpu else None,
            "device_reserved": torch.cuda.max_memory_reserved() if has_gpu else None,
        }


def _highest_rss() -> int:
    return int(_STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that memory did not suffice."""
    is_torch = any(phrase in str(error) for phrase in _HOST)
    return is_torch or isinstance(error, (MemoryError, torch.OutOfMemoryError))


if __name__ == "__main__":
    found = measure(Cell(**json.loads(sys.argv[1])), int(sys.argv[3]) if len(sys.argv) > 3 else None)
    Path(sys.argv[2]).write_text(json.dumps(found))
