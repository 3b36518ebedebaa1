"""Folding: attention transforms its query and its output, instead of every key and value."""

import torch

from ..storage import KVCodec
from .minmax import MinMaxCodec, minmax_codecs
from .precision import as_written
from .torch_quantization import rotated


def is_foldable(codec: KVCodec) -> bool:
    """Whether kernels attend to blocks that are quantized like this."""
    both = minmax_codecs(codec)
    if both is None:
        return False
    keys, values = both
    # Scales of channels fold into the query, scales of tokens into the weights.
    return (
        keys.per_channel
        and not values.per_channel
        and (keys.channel_scaling is None or not keys.channel_scaling.is_matrix)
        and (values.channel_scaling is None or values.channel_scaling.is_matrix)
    )


def folded_codecs(codec: KVCodec) -> tuple[MinMaxCodec, MinMaxCodec]:
    """Return the codecs of keys and values of a codec that `is_foldable`."""
    both = minmax_codecs(codec)
    assert both is not None
    return both


def map_to_states(codec: MinMaxCodec, head_dim: int) -> torch.Tensor | None:
    """
    Return the matrices that turn dequantized numbers into states: rotation and channel scaling undone.

    Returns:
        float32 `[num_kv_heads, head_dim, head_dim]`, or `[1, head_dim, head_dim]` if it is one for all heads; row
        vectors are multiplied by it; `None` if the numbers are the states.
    """
    layout = codec.layout(head_dim)
    if layout.rotation == 1 and codec.channel_scaling is None:
        return None
    plain = torch.eye(head_dim).expand(1, 1, -1, -1)
    with as_written(plain.device):
        turned = rotated(plain, layout)
        return turned[0] if codec.channel_scaling is None else codec.channel_scaling.undone(turned)[0]
