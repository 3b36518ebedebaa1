"""What a coded block of keys or values looks like, one file for each form."""

from .balance import Balance
from .description import describe, described_codec, weights_of
from .minmax import MinMaxCodec, Rotate, minmax
from .quanto import quanto

__all__ = ["Balance", "MinMaxCodec", "Rotate", "describe", "described_codec", "minmax", "quanto", "weights_of"]
