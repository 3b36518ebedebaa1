"""How much room to make when a buffer is full."""

from dataclasses import dataclass

GRANULE = 64
_MIN_CHUNK = 256
_MAX_CHUNK = 4096


@dataclass(frozen=True)
class Room:
    """
    How much room buffers make before their first token.

    Args:
        device_tokens: memory of the accelerator, taken at once; 0 grows in chunks.
        host_tokens: address space, which costs nothing until it is used.
    """

    device_tokens: int = 0
    host_tokens: int = 131_072


def grown_capacity(num_tokens: int) -> int:
    """
    Tokens to make room for when `num_tokens` are needed: an eighth more, at least 256 and at most 4,096.

    Short contexts waste little, and a buffer that has to be copied to grow is copied once in thousands of tokens.
    """
    chunk = min(max(num_tokens // 8, _MIN_CHUNK), _MAX_CHUNK)
    return -(-(num_tokens + chunk) // GRANULE) * GRANULE
