"""Other machines by their published peak bandwidths, of which a share is reached."""

import json
from dataclasses import dataclass, replace
from functools import cache

from experiments.common.records import RESULTS
from hf_hybrid_cache.planning import Machine
from hf_hybrid_cache.planning.machine import CacheSpeed, DeviceSpeed, Speeds

# The share of a peak that the measured processors reach (docs/log.md), assumed for the others too.
REACHED = 0.8
# Assumed: a layer's operations in transformers without compiling, and a query to the host and a result back.
LAUNCH_SECONDS, ROUND_TRIP_SECONDS = 100e-6, 40e-6
GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class PublishedMachine:
    """
    A GPU in a host.

    Attributes:
        name: of both.
        gpu_gib: its memory.
        host_gib: assumed.
        gpu_gbs: peak of its memory, GB/s.
        bus_gbs: peak of the bus in one direction.
        host_gbs: peak of the host's memory.
        source: of the peaks.
        cpu_speed: what attention on the CPU reads, of what its memory gives.
    """

    name: str
    gpu_gib: int
    host_gib: int
    gpu_gbs: float
    bus_gbs: float
    host_gbs: float
    source: str
    cpu_speed: float = 1.0

    def times(self, bus: float, cpu: float) -> "PublishedMachine":
        """Return the machine with a bus and a CPU that are so many times as fast."""
        return replace(self, bus_gbs=bus * self.bus_gbs, cpu_speed=cpu * self.cpu_speed)

    @property
    def machine(self) -> Machine:
        """Return the machine in the planner's form."""
        host, device, bus = (REACHED * each * GB for each in (self.host_gbs, self.gpu_gbs, self.bus_gbs))
        rates = {"dynamic": host * self.cpu_speed, "quantized-4": host * self.cpu_speed * share_of_codes()}
        caches = {cache: CacheSpeed(((0, 0), (GB, GB / rate)), 0) for cache, rate in rates.items()}
        on_gpu = DeviceSpeed(device, LAUNCH_SECONDS)
        speeds = Speeds(DeviceSpeed(host, caches=caches), on_gpu, bus, ROUND_TRIP_SECONDS)
        return Machine(self.gpu_gib * GIB, self.host_gib * GIB, speeds)


@cache
def share_of_codes() -> float:
    """Return the read rate of attention to 4-bit codes over a plain sum's: the least of the measured processors."""
    found = [json.loads(path.read_text()) for path in sorted((RESULTS / "kernel_bandwidth").glob("*.json"))]
    longest = (max(record["cells"], key=lambda cell: cell["tokens"]) for record in found)
    return min(cell["formats"]["int4"]["share_of_read_bandwidth"] for cell in longest)


# A transfer of DDR is 8 bytes a channel; a lane of PCIe 4.0 and 5.0 carries 16 and 32 Gbit/s, of which 128 bits of 130.
_PCIE_4, _PCIE_5 = 16 * 16 / 8 * 128 / 130, 16 * 32 / 8 * 128 / 130
MACHINES = (
    PublishedMachine(
        *("RTX 3060, 2 channels of DDR4-3200", 12, 64, 360, _PCIE_4, 2 * 3.2 * 8),
        "nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3060-3060ti: 192 bits of GDDR6, 15 Gbit/s; JESD79-4",
    ),
    PublishedMachine(
        *("RTX 4090, 2 channels of DDR5-5600", 24, 96, 1008, _PCIE_4, 2 * 5.6 * 8),
        "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090: 384 bits of GDDR6X, 21 Gbit/s; JESD79-5",
    ),
    PublishedMachine(
        *("H100 SXM, 8 channels of DDR5-4800", 80, 512, 3350, _PCIE_5, 8 * 4.8 * 8),
        "nvidia.com/en-us/data-center/h100: 3.35 TB/s, PCIe 5.0; JESD79-5",
    ),
)
# Hosts of models with experts in host memory; the amount of memory is varied.
_SERVER_GBS = 8 * 4.8 * 8
CARDS = (
    PublishedMachine(
        *("RTX 4060, 2 channels of DDR5-5600", 8, 64, 272, _PCIE_4 / 2, 2 * 5.6 * 8),
        "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4060-4060ti: 128 bits of GDDR6, 17 Gbit/s, 8 lanes of "
        "PCIe 4.0; JESD79-5",
    ),
    PublishedMachine(
        *("RTX 4090, 8 channels of DDR5-4800", 24, 512, 1008, _PCIE_4, _SERVER_GBS),
        f"{MACHINES[1].source}; a socket of what github.com/kvcache-ai/ktransformers was measured on",
    ),
)
