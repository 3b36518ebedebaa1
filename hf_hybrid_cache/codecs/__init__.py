"""Codecs: forms of quantized blocks of keys and values, one file each."""

from .channel_scaling import ChannelScaling
from .description import describe, described_codec, is_form_of, weights_of
from .minmax import MinMaxCodec, Rotate, folded_codecs, is_foldable, map_to_states, minmax
from .quanto import quanto
from .torch_quantization import as_written

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
