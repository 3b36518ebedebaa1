"""Counters of copies between host and device, and of attention on the host."""

from collections import Counter
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
        prefetch_hits: layers whose past was on the device, or on its way, when the layer came to use it.
        prefetch_misses: layers whose past had to be fetched when it was already needed.
        evictions: device copies given up for another layer. Nothing is copied then: the host holds the truth.
        kernel_seconds: spent in attention on the CPU.
        tokens_held: by index of the layer, what attention with a selection could have read: tokens of all its calls,
            counted for each KV head.
        tokens_read: what it has read of these.
        decisions: decisions about the place of tokens, in order.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    evictions: int = 0
    kernel_seconds: float = 0.0
    tokens_held: Counter[int] = field(default_factory=Counter)
    tokens_read: Counter[int] = field(default_factory=Counter)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def share_read(self) -> dict[int, float]:
        """Fraction of the tokens that attention with a selection has read, by index of the layer."""
        return {index: self.tokens_read[index] / held for index, held in self.tokens_held.items()}

    def note_read(self, layer_idx: int, read: int, held: int) -> None:
        """Count one call of attention with a selection."""
        self.tokens_read[layer_idx] += read
        self.tokens_held[layer_idx] += held

    def note_decision(self, num_tokens: int, option: str, value: float, reason: str) -> None:
        """Add to `decisions`, unless the layer before has decided the same."""
        decision = Decision(num_tokens, option, value, reason)
        if decision not in self.decisions[-1:]:
            self.decisions.append(decision)

    def clear(self) -> None:
        vars(self).update(vars(CacheStats()))
