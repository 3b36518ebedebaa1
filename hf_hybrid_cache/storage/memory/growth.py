"""Capacity of buffers, before the first token and as they grow."""

from dataclasses import dataclass

GRANULE = 64
_MIN_CHUNK = 256
_MAX_CHUNK = 4096


@dataclass(frozen=True)
class InitialCapacity:
    """
    Capacity of buffers before their first token.

    Args:
        device_tokens: memory of the accelerator, taken at once; 0 grows in chunks.
        host_tokens: address space, which costs nothing until it is used.
    """

    device_tokens: int = 0
    host_tokens: int = 131_072

    @classmethod
    def expecting(cls, max_length: int | None, context: int | None) -> "InitialCapacity":
        """Return the capacity for a cache of `max_length` tokens and a model's context, as far as they are known."""
        # A chunk more, because host memory is asked for a chunk ahead.
        return cls(max_length or 0, grown_capacity(max(cls.host_tokens, max_length or 0, context or 0)))

    def of_packed(self) -> "InitialCapacity":
        """Return the capacity in blocks instead of tokens, for packed blocks."""
        return InitialCapacity(-(-self.device_tokens // GRANULE), -(-self.host_tokens // GRANULE))


def grown_capacity(num_entries: int, entry_tokens: int = 1) -> int:
    """
    Return a capacity of an eighth more than `num_entries`, but at least 256 and at most 4,096 tokens more.

    Short contexts waste little, and a buffer that has to be copied to grow is copied once in thousands of tokens.
    """
    chunk = min(max(num_entries * entry_tokens // 8, _MIN_CHUNK), _MAX_CHUNK)
    return least_capacity(num_entries * entry_tokens + chunk) // entry_tokens


def least_capacity(num_entries: int, entry_tokens: int = 1) -> int:
    """Return the least capacity for `num_entries`, in whole blocks of 64 tokens."""
    return -(-num_entries * entry_tokens // GRANULE) * GRANULE // entry_tokens
