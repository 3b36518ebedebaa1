"""What a coded block of keys or values looks like, one file for each form."""

from .minmax import MinMaxCodec, minmax
from .quanto import quanto

__all__ = ["MinMaxCodec", "minmax", "quanto"]
