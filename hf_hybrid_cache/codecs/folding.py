"""What attention folds into its query and its result, instead of undoing it for every key and value."""

import torch

from ..storage import KVCodec
from .minmax import MinMaxCodec
from .packing import rotated
from .precision import as_written


def is_foldable(codec: KVCodec) -> bool:
    """Whether kernels attend to blocks that are coded like this."""
    keys, values = codec.keys, codec.values
    # Scales of channels fold into the query, scales of tokens into the weights.
    return (
        isinstance(keys, MinMaxCodec)
        and keys.per_channel
        and isinstance(values, MinMaxCodec)
        and not values.per_channel
        and (keys.balance is None or not keys.balance.is_matrix)
        and (values.balance is None or values.balance.is_matrix)
    )


def map_to_states(codec: MinMaxCodec, head_dim: int) -> torch.Tensor | None:
    """
    The matrices that the numbers which codes stand for are multiplied by to be states: rotation and balance undone.

    Returns:
        float32 `[num_kv_heads, head_dim, head_dim]`, or `[1, head_dim, head_dim]` if it is one for all heads; row
        vectors are multiplied by it; `None` if the numbers are the states.
    """
    layout = codec.layout(head_dim)
    if layout.rotation == 1 and codec.balance is None:
        return None
    plain = torch.eye(head_dim).expand(1, 1, -1, -1)
    with as_written(plain.device):
        turned = rotated(plain, layout)
        return turned[0] if codec.balance is None else codec.balance.undone(turned)[0]
