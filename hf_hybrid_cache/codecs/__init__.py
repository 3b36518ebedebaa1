"""What a coded block of keys or values looks like, one file for each form."""

from .description import describe, described_codec
from .minmax import MinMaxCodec, minmax
from .quanto import quanto

__all__ = ["MinMaxCodec", "describe", "described_codec", "minmax", "quanto"]
