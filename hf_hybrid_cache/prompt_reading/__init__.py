"""Reading a prompt into a cache, chunk by chunk."""

from .reading import prefill, read_passes, warn_beyond_context

__all__ = ["prefill", "read_passes", "warn_beyond_context"]
