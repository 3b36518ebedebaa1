"""The machine that a plan is for: its memory, and its speeds, which are measured once and stored in a file."""

import json
import platform
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import HybridCacheError
from ..prefill_chunks import PREFILL_CHUNK_SIZE
from ..storage import available_host_bytes
from ..user_folder import cache_home, write_whole

_SCHEMA = 1
# A number outside of these bounds is no measurement, and products of such numbers may overflow.
_LEAST, _MOST = 1e-15, 1e30


class SpeedsFileError(HybridCacheError, ValueError):
    """Measured speeds cannot be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class CacheSpeed:
    """
    The speed of a cache on one device.

    Attributes:
        steps: two or more pairs, the smallest first: bytes stored in one layer, and seconds of its update and
            attention in a decode step.
        attention_flops: floating-point operations per second of attention in the prefill.
    """

    steps: tuple[tuple[float, float], ...]
    attention_flops: float

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.steps]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ValueError(f"steps must be of two or more sizes, the smallest first, got {sizes}")

    def step_seconds(self, layer_bytes: float) -> float:
        """Seconds of a step with so many bytes in the layer, interpolated from the nearest two measurements."""
        position = min(max(1, bisect_left(self.steps, (layer_bytes,))), len(self.steps) - 1)
        (less, sooner), (more, later) = self.steps[position - 1 : position + 1]
        return max(0.0, sooner + (later - sooner) * (layer_bytes - less) / (more - less))


@dataclass(frozen=True)
class WeightSpeed:
    """
    The speed of products with quantized weights.

    Attributes:
        bytes_per_second: of codes that are read, in products with one token.
        flops: floating-point operations per second in products with many tokens; `None` if not known.
    """

    bytes_per_second: float
    flops: float | None = None


@dataclass(frozen=True)
class DeviceSpeed:
    """
    The speed of a device.

    Attributes:
        weight_bytes_per_second: of weights that are read, in products with one token.
        layer_seconds: seconds of one layer in a step, without weights and attention.
        flops: floating-point operations per second in products with many tokens; `None` if not known.
        caches: speeds of caches by name, as far as known.
        quantized_weights: speeds of quantized weights by bits, as far as known.
    """

    weight_bytes_per_second: float
    layer_seconds: float = 0.0
    flops: float | None = None
    caches: Mapping[str, CacheSpeed] = field(default_factory=dict)
    quantized_weights: Mapping[int, WeightSpeed] = field(default_factory=dict)


@dataclass(frozen=True)
class Speeds:
    """
    The speeds of a machine; `None` where not known.

    Attributes:
        host: of its CPU.
        device: of its GPU.
        bus_bytes_per_second: of copies from page-locked host memory to the GPU.
        round_trip_seconds: of a small tensor from the GPU to the host and back.
    """

    host: DeviceSpeed | None = None
    device: DeviceSpeed | None = None
    bus_bytes_per_second: float | None = None
    round_trip_seconds: float = 0.0


@dataclass(frozen=True)
class Machine:
    """
    The memory that a plan may use, and the speeds of the machine.

    Attributes:
        device_bytes: GPU memory; 0 for no GPU.
        host_bytes: host memory.
        speeds: as far as they are known.
    """

    device_bytes: int
    host_bytes: int
    speeds: Speeds = Speeds()


def default_chunk(on_gpu: bool) -> int:
    """The default `prefill_chunk_size`: on a GPU few tokens, to save memory; on a CPU the fastest number."""
    return 512 if on_gpu else PREFILL_CHUNK_SIZE


def free_device_bytes(index: int | None = None) -> int:
    """
    Free bytes on an accelerator, torch's reserve included; 0 without one, or if it does not say.

    Args:
        index: of the accelerator; `None` for the current one.
    """
    if not torch.accelerator.is_available():
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info(index)
    except RuntimeError:
        return 0
    return free + torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)


def accelerator_name() -> str | None:
    """The name of the current accelerator; `None` without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return accelerator.type if name is None else str(name())


def this_machine(device_bytes: int | None = None, host_bytes: int | None = None, speeds: Speeds = Speeds()) -> Machine:
    """
    Describe this machine.

    Args:
        device_bytes: GPU memory that a plan may use; `None` for the memory that is free now.
        host_bytes: host memory that a plan may use; `None` for the memory that is free now.
        speeds: as far as they are known, as from `calibrate`.
    """
    return Machine(
        free_device_bytes() if device_bytes is None else device_bytes,
        available_host_bytes() if host_bytes is None else host_bytes,
        speeds,
    )


def cpu_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def speeds_path() -> Path:
    """The file that stores the measured speeds of this machine."""
    return cache_home() / "speeds.json"


def load_speeds(dtype: torch.dtype) -> Speeds:
    """
    Load the speeds that were measured on this machine with models of `dtype`; empty if there was no measurement.

    Raises:
        SpeedsFileError: the file is damaged, or was made on another machine or with another version.
    """
    here = _signature()
    try:
        path = speeds_path()
        content = json.loads(path.read_text())
        there = dict(content["measured_on"])
        kept = content["speeds"]
        speeds = _parsed(kept[str(dtype)]) if str(dtype) in kept else Speeds()
    except FileNotFoundError:
        return Speeds()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"is damaged ({type(error).__name__}: {error})"
        raise SpeedsFileError(f"{path} {problem} and is not used. Measure again with --calibrate.") from error
    if there != here:
        different = (name for name, value in here.items() if there.get(name) != value)
        problem = f"was measured with {', '.join(f'{name} {there.get(name)}, not {here[name]}' for name in different)},"
        raise SpeedsFileError(f"{path} {problem} and is not used. Measure again with --calibrate.")
    return speeds


def save_speeds(dtype: torch.dtype, speeds: Speeds) -> Path:
    """Store the speeds of this machine with models of `dtype`, beside those of other dtypes; return the file."""
    path, here = speeds_path(), _signature()
    try:
        content = json.loads(path.read_text())
        kept = dict(content["speeds"]) if content["measured_on"] == here else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        kept = {}
    kept[str(dtype)] = asdict(speeds)
    write_whole(path, json.dumps({"measured_on": here, "speeds": kept}, indent=1) + "\n")
    return path


def _signature() -> dict[str, Any]:
    """The machine and the software that a measurement is valid for."""
    return {
        "schema": _SCHEMA,
        "hf_hybrid_cache": __version__,
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "gpu": accelerator_name(),
    }


def _parsed(speeds: dict[str, Any]) -> Speeds:
    """Speeds from the dictionary that `asdict` made."""
    bus = speeds["bus_bytes_per_second"]
    return Speeds(
        _parsed_device(speeds["host"]),
        _parsed_device(speeds["device"]),
        None if bus is None else _positive("bus_bytes_per_second", bus),
        _seconds("round_trip_seconds", speeds["round_trip_seconds"]),
    )


def _parsed_device(speed: dict[str, Any] | None) -> DeviceSpeed | None:
    if speed is None:
        return None
    caches = {
        name: CacheSpeed(
            tuple((_positive("a size", size), _positive("a step", seconds)) for size, seconds in cache["steps"]),
            _positive("attention_flops", cache["attention_flops"]),
        )
        for name, cache in speed["caches"].items()
    }
    # Older files have no speeds of quantized weights.
    quantized_weights = {
        int(bits): WeightSpeed(_positive("bytes_per_second", weights["bytes_per_second"]), _flops(weights["flops"]))
        for bits, weights in speed.get("quantized_weights", {}).items()
    }
    return DeviceSpeed(
        _positive("weight_bytes_per_second", speed["weight_bytes_per_second"]),
        _seconds("layer_seconds", speed["layer_seconds"]),
        _flops(speed["flops"]),
        caches,
        quantized_weights,
    )


def _flops(value: Any) -> float | None:
    return None if value is None else _positive("flops", value)


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _seconds(name: str, value: Any) -> float:
    return 0.0 if value == 0 else _positive(name, value)
