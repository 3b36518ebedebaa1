"""Reading a prompt into a cache, chunk by chunk."""

from .reading import PREFILL_CHUNK_SIZE, prefill

__all__ = ["PREFILL_CHUNK_SIZE", "prefill"]
