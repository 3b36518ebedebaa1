"""The machine that a plan is for: its memory, and its speeds, which are measured once and kept in a file."""

import json
import platform
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..storage import available_host_bytes
from ..user_folder import cache_home, write_whole

_SCHEMA = 1
# Numbers beyond are no measurements, and products of them may be infinite.
_LEAST, _MOST = 1e-15, 1e30


class SpeedsFileError(ValueError):
    """Measured speeds cannot be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class CacheSpeed:
    """
    How fast a cache is on one device.

    Attributes:
        steps: bytes stored in one layer, and seconds that its update and its attention then take in a decode step; two
            or more such pairs, the fewest bytes first.
        attention_flops: a second, in the prefill.
    """

    steps: tuple[tuple[float, float], ...]
    attention_flops: float

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.steps]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ValueError(f"steps must be of two or more sizes, the smallest first, got {sizes}")

    def step_seconds(self, layer_bytes: float) -> float:
        """Seconds with so many bytes in the layer: on the line between the steps beside it, or the nearest two."""
        position = min(max(1, bisect_left(self.steps, (layer_bytes,))), len(self.steps) - 1)
        (less, sooner), (more, later) = self.steps[position - 1 : position + 1]
        return max(0.0, sooner + (later - sooner) * (layer_bytes - less) / (more - less))


@dataclass(frozen=True)
class WeightSpeed:
    """
    How fast a device multiplies weights of few bits.

    Attributes:
        bytes_per_second: of codes, read by products with one token.
        flops: a second, in products with many tokens; `None` if that is not known.
    """

    bytes_per_second: float
    flops: float | None = None


@dataclass(frozen=True)
class DeviceSpeed:
    """
    How fast a device computes a model.

    Attributes:
        weight_bytes_per_second: read by products of the weights with one token.
        layer_seconds: of a step of one layer besides weights and attention.
        flops: a second, in products of the weights with many tokens; `None` if that is not known.
        caches: by name, as far as they are known.
        coded_weights: weights of few bits by their bits, likewise.
    """

    weight_bytes_per_second: float
    layer_seconds: float = 0.0
    flops: float | None = None
    caches: Mapping[str, CacheSpeed] = field(default_factory=dict)
    coded_weights: Mapping[int, WeightSpeed] = field(default_factory=dict)


@dataclass(frozen=True)
class Speeds:
    """
    How fast a machine is; `None` is not known.

    Attributes:
        host: its CPU.
        device: its GPU.
        bus_bytes_per_second: from page-locked host memory to the GPU.
        round_trip_seconds: of a query to the host and a result back.
    """

    host: DeviceSpeed | None = None
    device: DeviceSpeed | None = None
    bus_bytes_per_second: float | None = None
    round_trip_seconds: float = 0.0


@dataclass(frozen=True)
class Machine:
    """
    What a plan may use.

    Attributes:
        device_bytes: of the GPU; 0 is none.
        host_bytes: of host memory.
        speeds: as far as they are known.
    """

    device_bytes: int
    host_bytes: int
    speeds: Speeds = Speeds()


def default_chunk(on_gpu: bool) -> int:
    """Tokens of a prompt in a forward pass, few on a GPU for their activations, on a CPU the fastest."""
    return 512 if on_gpu else 2048


def free_device_bytes() -> int:
    """Bytes that are free on the current accelerator, also in what torch keeps for itself; 0 where none tells."""
    if not torch.accelerator.is_available():
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info()
    except RuntimeError:
        return 0
    return free + torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()


def accelerator_name() -> str | None:
    """What the current accelerator is called; `None` without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return accelerator.type if name is None else str(name())


def this_machine(device_bytes: int | None, host_bytes: int | None, speeds: Speeds = Speeds()) -> Machine:
    """What is given, and what is free here where it is `None`."""
    return Machine(
        free_device_bytes() if device_bytes is None else device_bytes,
        available_host_bytes() if host_bytes is None else host_bytes,
        speeds,
    )


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def speeds_path() -> Path:
    return cache_home() / "speeds.json"


def load_speeds(dtype: torch.dtype) -> Speeds:
    """
    The speeds that were measured on this machine with models of `dtype`; before that none are known.

    Raises:
        SpeedsFileError: the file is damaged, or of another machine or version.
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
    """Keep the speeds of this machine with models of `dtype`, beside those of other types; returns the file."""
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
    """What a measurement belongs to."""
    return {
        "schema": _SCHEMA,
        "hf_hybrid_cache": __version__,
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "gpu": accelerator_name(),
    }


def _parsed(speeds: dict[str, Any]) -> Speeds:
    """What `asdict` made of speeds."""
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
    # Files of before there were such weights have none.
    coded_weights = {
        int(bits): WeightSpeed(_positive("bytes_per_second", weights["bytes_per_second"]), _flops(weights["flops"]))
        for bits, weights in speed.get("coded_weights", {}).items()
    }
    return DeviceSpeed(
        _positive("weight_bytes_per_second", speed["weight_bytes_per_second"]),
        _seconds("layer_seconds", speed["layer_seconds"]),
        _flops(speed["flops"]),
        caches,
        coded_weights,
    )


def _flops(value: Any) -> float | None:
    return None if value is None else _positive("flops", value)


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _seconds(name: str, value: Any) -> float:
    return 0.0 if value == 0 else _positive(name, value)
