"""Folding: attention transforms its query and its output, instead of every key and value."""

import torch

from ..storage import KVCodec
from .minmax import MinMaxCodec
from .precision import as_written
from .torch_quantization import rotated


def is_foldable(codec: KVCodec) -> bool:
    """Whether kernels attend to blocks that are quantized like this."""
    keys, values = codec.keys, codec.values
    # Scales of channels fold into the query, scales of tokens into the weights.
    return (
        isinstance(keys, MinMaxCodec)
        and keys.per_channel
        and isinstance(values, MinMaxCodec)
        and not values.per_channel
        and (keys.channel_scaling is None or not keys.channel_scaling.is_matrix)
        and (values.channel_scaling is None or values.channel_scaling.is_matrix)
    )


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
