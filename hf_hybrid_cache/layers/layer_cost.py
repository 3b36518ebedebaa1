"""The bytes that a layer will hold, computed by its own stores before there is one."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..storage import InitialCapacity, KVCodec, KVShape, Scratch
from .layer_stores import LayerStores
from .placement import Placement

HOST = torch.device("cpu")


class LayerCost(NamedTuple):
    """
    The cost of one layer.

    Attributes:
        kept: bytes that the layer holds alone, by device type.
        shared_prefill: bytes on the compute device that layers use in turn, at the end of the prompt.
        shared_decode: bytes on the compute device that layers use in turn while tokens are decoded.
        copied: host memory for the states of the layer, which the prompt's last chunk unpacks from the kernel's blocks.
        moved: bytes that a step writes and reads because it decodes quantized states.
    """

    kept: Counter[str]
    shared_prefill: int
    shared_decode: int
    copied: int
    moved: int

    @classmethod
    def of(
        cls, stores: LayerStores, index: int, shape: KVShape, num_layers: int, lengths: Sequence[int]
    ) -> "LayerCost":
        """
        The cost of a layer that has grown in steps.

        Args:
            stores: of the cache.
            index: of the layer in the model.
            shape: of its keys and values; a device without data stands for an accelerator.
            num_layers: number of layers of this shape.
            lengths: numbers of tokens that the layer has had in turn.
        """
        store = stores.make(index, 0, shape)
        kept: Counter[str] = Counter()
        for device, num_bytes in store.planned_bytes(lengths):
            kept[device.type] += num_bytes
        attends_on_cpu = stores.attends_on_cpu(index, 0, shape)
        attends_in_place = attends_on_cpu or stores.attends_quantized(index, 0, shape)
        all_states = lengths[-1] * sum(shape.token_bytes)
        # Attention of a chunk then unpacks few blocks at a time.
        is_streamed = not attends_on_cpu or stores.cpu_fraction is not None
        takes_some = stores.attention.has_kernel_for_many(shape) or shape.key_dim == shape.value_dim
        in_pieces = not is_streamed and shape.device == HOST and takes_some
        slots = scratch = of_middle = copied = moved = 0
        sizes, layouts = lengths, store.layout.growing(lengths)
        is_split, is_quantized = store.layout.device_tokens > 0, store.layout.is_quantized
        if is_split:
            # A chunk of a prompt needs all states in one tensor, unless it attends to them in pieces.
            if not in_pieces:
                scratch = Scratch.planned_bytes(shape, lengths[1:])
            sizes = [each.host_tokens for each in layouts]
            if is_quantized and not in_pieces:
                of_middle = Scratch.planned_bytes(shape, sizes)
        if is_quantized:
            sizes = [each.quantized_blocks for each in layouts]
            moved = 0 if attends_in_place else 2 * all_states
            # The first chunk attends to its own states, which are not quantized yet.
            later = lengths[1:] if attends_on_cpu else lengths[1:] or lengths
            if not in_pieces:
                scratch = Scratch.planned_bytes(shape, later)
        elif attends_on_cpu and shape.device == HOST and not in_pieces and len(lengths) > 1:
            copied = all_states
        if store.streamed is not None:
            slots = store.streamed.staging.planned_bytes(store.streamed.shape, num_layers, sizes)
        is_put_together = not attends_in_place and not is_split
        while_decoding = slots + of_middle + (scratch if is_put_together else 0) if is_streamed else 0
        return cls(kept, slots + scratch, while_decoding, copied, moved)


def layer_bytes(shape: KVShape, codec: KVCodec | None, num_tokens: int) -> int:
    """Bytes of `num_tokens` tokens of one layer, quantized by `codec`, in the blocks that the CPU kernel reads."""
    stores = LayerStores(Placement(), InitialCapacity(), 1, {} if codec is None else {0: codec})
    store = stores.make(0, 0, shape._replace(device=HOST))
    return sum(num_bytes for _, num_bytes in store.planned_bytes([num_tokens]))
