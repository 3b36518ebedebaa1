"""Reading a prompt into a cache, chunk by chunk."""

from .images import forget_images
from .one_pass import layer_that_begins_anew
from .reading import prefill, read_passes, warn_beyond_context

__all__ = ["forget_images", "layer_that_begins_anew", "prefill", "read_passes", "warn_beyond_context"]
