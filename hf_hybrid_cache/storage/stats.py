"""Counters of what moved between host and device, and of what was attended to on the host."""

from dataclasses import dataclass, fields


@dataclass
class CacheStats:
    """
    Counts since the cache was built or last reset.

    Attributes:
        bytes_to_device: keys and values copied from host memory to the compute device.
        bytes_to_host: keys and values copied from the compute device to host memory.
        prefetch_hits: layers whose past was on the device, or on its way, when the layer came to use it.
        waits: layers whose past had to be fetched when it was already needed.
        evictions: device copies given up for another layer. Nothing is copied then: the host holds the truth.
        kernel_seconds: spent in attention on the CPU.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    prefetch_hits: int = 0
    waits: int = 0
    evictions: int = 0
    kernel_seconds: float = 0.0

    def clear(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)
