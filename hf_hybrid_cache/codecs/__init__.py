"""Codecs: forms of quantized blocks of keys and values, one file each."""

from .channel_scaling import ChannelScaling
from .description import describe, described_codec, is_form_of, weights_of
from .folding import folded_codecs, is_foldable, map_to_states
from .minmax import MinMaxCodec, Rotate, minmax
from .precision import as_written
from .quanto import quanto

__all__ = [
    "ChannelScaling",
    "MinMaxCodec",
    "Rotate",
    "as_written",
    "describe",
    "described_codec",
    "folded_codecs",
    "is_foldable",
    "is_form_of",
    "map_to_states",
    "minmax",
    "quanto",
    "weights_of",
]
