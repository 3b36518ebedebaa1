"""
A decode step of a whole model on a machine with a GPU, with our caches and those of transformers.

The shape of Llama-3.1-8B with random weights in bfloat16, and random keys and values in place of a prompt. The caches
are measured one after the other, those that decide first. The record is written after each, and the same command goes
on with those that it lacks. What streams is compared with a plain copy from page-locked memory. A cache that does not
fit, or does not run, is left out, and the record says why. In torch the attention of cuDNN plans each new length anew,
which takes longer than many a step: all are measured without it.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import records
from experiments.common.bandwidth import bus_bandwidth
from experiments.common.decoding import GreedyDecoder
from experiments.common.options import plain_parser
from experiments.common.synthetic import fill, kv_bytes
from experiments.common.timing import seconds_of
from experiments.quality.quality_caches import stored_bytes
from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from hf_hybrid_cache.models import load_config

MODEL, SMALL_MODEL = "meta-llama/Llama-3.1-8B", "llama-3.2-1b-random"
FILL_CHUNK = 8192
# The share of the CPU has settled after ten moves, each after 192 layers.
_LAYERS_OF_MOVES = 1920

_quantized = partial(QuantizedHybridCache, bits=4)
_ours = partial(OffloadedHybridCache, cpu_decode=False)
# With "both" the CPU attends to what is not streamed meanwhile, with "half" to the half that is not on the device.
CACHES: Mapping[str, Callable[..., Cache]] = {
    "offloaded": _ours,
    "stock-offloaded": lambda config: DynamicCache(config=config, offloading=True),
    "cpu-attention": partial(OffloadedHybridCache, cpu_decode=True),
    "both": partial(OffloadedHybridCache, cpu_decode="auto"),
    "streamed-4": partial(_quantized, offload=True, cpu_decode=False),
    "cpu-attention-4": partial(_quantized, offload=True, cpu_decode=True),
    "both-4": partial(_quantized, offload=True, cpu_decode="auto"),
    "half-cpu-attention": partial(OffloadedHybridCache, cpu_decode=True),
    "half-cpu-attention-4": partial(_quantized, cpu_decode=True),
    "codes-4": partial(_quantized, cpu_decode=False),
    "stock": lambda config: DynamicCache(config=config),
    "dynamic": partial(DynamicHybridCache, cpu_decode=False),
}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def allocated() -> int:
    """Return the bytes of device memory in use; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def make_model(is_rehearsal: bool) -> PreTrainedModel:
    config: Any = load_config(SMALL_MODEL if is_rehearsal else MODEL)
    if is_rehearsal:
        config.num_hidden_layers, config.vocab_size = 2, 512
    with torch.device(device()):  # which draws eight billion numbers in a second
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def measure(model: PreTrainedModel, name: str, context: int, steps: int) -> dict[str, Any]:
    """Fill one cache and decode with it: seconds of each step, bytes held, read and moved, and device memory."""
    gc.collect()
    before = allocated()
    half = {"device_tokens": max(128, context // 2)} if name.startswith("half") else {}
    cache = CACHES[name](model.config, **half)
    fill(cache, model.config, context, torch.bfloat16, device(), FILL_CHUNK)
    decoder = GreedyDecoder(model, cache)
    is_moving = name.startswith("both") and torch.cuda.is_available()
    for _ in range(_LAYERS_OF_MOVES // model.config.num_hidden_layers if is_moving else 2):
        decoder.step()
    held = allocated() - before
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    moved = moved_bytes(cache)
    samples = [seconds_of(decoder.step) for _ in range(steps)]
    return {
        "samples_seconds": samples,
        "median_seconds": median(samples),
        "kv_bytes_per_second": stored_bytes(cache) / median(samples),
        "streamed_bytes_per_second": (moved_bytes(cache) - moved) / steps / median(samples),
        "device_bytes": held,
        "step_peak_bytes": torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else None,
        "decisions": cache.stats.decisions if isinstance(cache, HybridCache) else None,
    }


def moved_bytes(cache: Cache) -> int:
    """Return the bytes that our cache has copied to the device so far."""
    return cache.stats.bytes_to_device if isinstance(cache, HybridCache) else 0


def add(record: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Put what was measured of one cache into the record, in which each figure has the values of all caches."""
    for key, value in found.items():
        record.setdefault(key, {})[name] = value
    record.setdefault("tokens_per_second", {})[name] = 1 / found["median_seconds"]
    streamed, bus = found["streamed_bytes_per_second"], record["bus_bytes_per_second"]
    if streamed and bus and "cpu" not in name:
        record.setdefault("share_of_bus", {})[name] = streamed / bus
    held = "" if found["step_peak_bytes"] is None else f"{found['step_peak_bytes'] / 2**20:>9,.0f} MiB on the device"
    rate = f"{found['kv_bytes_per_second'] / 1e9:>7.1f} GB/s of keys and values"
    print(f"{name:<22}{found['median_seconds'] * 1e3:>9.2f} ms a token{rate}{held}", flush=True)


def begun(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the record to go on with: the one in the file if it is of this measurement and this revision."""
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        is_same = record["environment"]["git_revision"] == records.git_revision()
        if is_same and all(record.get(key) == value for key, value in fresh.items()):
            return record
    return fresh


def gpu_parser(experiment: str, description: str | None) -> argparse.ArgumentParser:
    parser = plain_parser(f"gpu/{experiment}", description)
    parser.add_argument("--rehearse", action="store_true", help="small, and on the CPU where there is no GPU")
    parser.add_argument("--force", action="store_true", help="measure again what is in the record")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; without a GPU only those of a rehearsal, which says where it writes."""
    given = parser.parse_args()
    if not (given.rehearse or torch.cuda.is_available()):
        parser.error("no CUDA device is available: pass --rehearse to try it out on the CPU.")
    if given.rehearse and given.out is None:
        parser.error("a rehearsal is no result: say with --out where its record goes.")
    return given


def main() -> None:
    parser = gpu_parser("decode-CONTEXT", __doc__)
    parser.add_argument("--caches", choices=CACHES, nargs="+", default=list(CACHES), help="(default: all)")
    parser.add_argument("--context", type=int, default=131_072, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="that are timed of each cache (default: %(default)s)")
    given = parsed(parser)
    steps = 2 if given.rehearse else given.steps
    torch.backends.cuda.enable_cudnn_sdp(False)
    folder = given.out or records.RESULTS / "gpu" / f"decode-{given.context}"
    record: dict[str, Any] = {
        "model": SMALL_MODEL if given.rehearse else MODEL,
        "context_tokens": given.context,
        "prefill": "synthetic",
        "steps": steps,
        "rehearsal": given.rehearse,
        "without_cudnn": True,
    }
    if not given.force:
        record = begun(folder / f"{records.machine_name()}.json", record)
    left_out: dict[str, str] = {}
    missing = [name for name in given.caches if name not in record.get("median_seconds", {})]
    if missing:
        if record.get("bus_bytes_per_second") is None:
            record["bus_bytes_per_second"] = bus_bandwidth() if torch.cuda.is_available() else None
        model = make_model(given.rehearse)
        size = kv_bytes(model.config, given.context, torch.bfloat16)
        record["bfloat16_kv_bytes"] = size
        print(f"{given.context:,} tokens, {size / 2**20:,.0f} MiB in bfloat16", flush=True)
    for name in missing:
        try:
            if name == "stock-offloaded" and not torch.cuda.is_available():
                raise RuntimeError("needs a GPU")
            add(record, name, measure(model, name, given.context, steps))
        except (MemoryError, RuntimeError, ValueError) as error:  # one cache less is no reason to stop
            left_out[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            print(f"{name} is left out: {left_out[name]}", flush=True)
        record["left_out"] = left_out
        path = records.save("gpu/decode", record, folder)
    print(f"record: {folder / path.name if missing else folder}")
    print(json.dumps(record.get("tokens_per_second", {})))
    if not record.get("median_seconds"):
        sys.exit(1)


if __name__ == "__main__":
    main()
