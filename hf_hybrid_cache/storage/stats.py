"""Counters of copies between host and device, and of attention on the host."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Decision(NamedTuple):
    """
    A decision of the cache on the place of tokens.

    Attributes:
        num_tokens: of each sequence at that moment.
        option: argument of the cache that would have asked for it: `cpu_decode` or `device_tokens`.
        value: its value.
        reason: why.
    """

    num_tokens: int
    option: str
    value: float
    reason: str


@dataclass
class CacheStats:
    """
    Counts since the cache was built or last reset.

    Attributes:
        bytes_to_device: keys and values copied from host memory to the compute device.
        bytes_to_host: keys and values copied from the compute device to host memory.
        prefetch_misses: layers whose past had to be fetched when it was already needed.
        kernel_seconds: spent in attention on the CPU.
        decisions: decisions about the place of tokens, in order.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    prefetch_misses: int = 0
    kernel_seconds: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    def note_decision(self, num_tokens: int, option: str, value: float, reason: str) -> None:
        """Add to `decisions`, unless the layer before has decided the same."""
        decision = Decision(num_tokens, option, value, reason)
        if decision not in self.decisions[-1:]:
            self.decisions.append(decision)

    def clear(self) -> None:
        vars(self).update(vars(CacheStats()))
