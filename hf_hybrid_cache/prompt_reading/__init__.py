"""Reading a prompt into a cache, chunk by chunk."""

from .reading import prefill

__all__ = ["prefill"]
