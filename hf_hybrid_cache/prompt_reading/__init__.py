"""Reading a prompt into a cache, chunk by chunk."""

from .reading import forget_images, layer_that_begins_anew, prefill, read_passes, warn_beyond_context

__all__ = ["forget_images", "layer_that_begins_anew", "prefill", "read_passes", "warn_beyond_context"]
