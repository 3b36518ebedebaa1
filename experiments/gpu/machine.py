"""The device that is measured, and what stands in for it where there is no GPU: the CPU, for a rehearsal."""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.models.random_weights import random_llama

NEEDED = "This measures a GPU, and no CUDA device is available: pass --rehearse to try it out on the CPU."
_COPIED_BYTES = 2**28


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def gpu_parser(record: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every measurement of a GPU; `record` names its folder of records."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(description or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="small, and on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, help=f"folder of the record (default: results/gpu/{record})")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; without a GPU only those of a rehearsal, which says where it writes."""
    given = parser.parse_args()
    if not has_gpu():
        if not given.rehearse:
            sys.exit(NEEDED)
        if given.out is None:
            parser.error("a rehearsal is no result: say with --out where its record goes.")
    return given


def config_of(is_rehearsal: bool) -> LlamaConfig:
    """The shape of Llama-3.2-1B; for a rehearsal with two layers and few words."""
    config = load_config("llama-3.2-1b-random")
    assert isinstance(config, LlamaConfig)
    if is_rehearsal:
        config.num_hidden_layers, config.vocab_size = 2, 512
        config.eos_token_id = config.bos_token_id = 1
    return config


def model_of(is_rehearsal: bool, on: str | None = None) -> LlamaForCausalLM:
    """Make a model with random weights in bfloat16, on the device by default."""
    return random_llama(config_of(is_rehearsal), torch.bfloat16, on or device())


def allocated() -> int:
    """Bytes of device memory in use; 0 without a GPU."""
    return torch.cuda.memory_allocated() if has_gpu() else 0


def synchronize() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def seconds_on_device(action: Callable[[], object]) -> float:
    """Return the seconds of an action, until the device has finished it."""
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def kernels_launched(action: Callable[[], object]) -> int | None:
    """Count the kernels that an action launches on the GPU; `None` without a GPU or its profiler."""
    if not has_gpu():
        return None
    synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            action()
            synchronize()
    except RuntimeError as error:
        print(f"kernels are not counted: {error}")
        return None
    on_gpu = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith("Mem") for event in on_gpu) or None


class PlainCopy:
    """A copy from page-locked memory to the device, whose rate is the limit of streaming."""

    def __init__(self, num_bytes: int = _COPIED_BYTES):
        self.num_bytes = num_bytes
        self._host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=has_gpu())
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device())

    def __call__(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
