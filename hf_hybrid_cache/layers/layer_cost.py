"""The bytes that a layer will hold, computed by its own stores before there is one."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..attention import has_kernel_for_many
from ..storage import KVShape, Scratch, SplitStore
from .layer_stores import LayerStores

HOST = torch.device("cpu")


class LayerCost(NamedTuple):
    """
    The cost of one layer.

    Attributes:
        kept: bytes that the layer holds alone, by device type.
        shared_prefill: bytes on the compute device that layers use in turn, at the end of the prompt.
        shared_decode: bytes on the compute device that layers use in turn while tokens are decoded.
        copied: host memory for the states of the layer, which the prompt's last chunk unpacks from the kernel's blocks.
    """

    kept: Counter[str]
    shared_prefill: int
    shared_decode: int
    copied: int

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
        place = stores.place_of(index, 0, shape)
        store = place.make(shape)
        is_split, is_quantized = isinstance(store, SplitStore), store.layout.is_quantized
        kept: Counter[str] = Counter()
        for device, num_bytes in store.planned_bytes(lengths):
            kept[device.type] += num_bytes
        on_cpu, attends_in_place = place.on_cpu, place.on_cpu or place.on_codes
        is_all_on_cpu = on_cpu and stores.cpu_fraction is None
        # Attention of a chunk then unpacks few blocks at a time.
        takes_some = has_kernel_for_many(shape) or shape.key_dim == shape.value_dim
        in_pieces = is_all_on_cpu and shape.device == HOST and takes_some
        later = lengths[1:]
        is_copied = on_cpu and shape.device == HOST and not is_quantized and not in_pieces and len(later) > 0
        slots = scratch = of_middle = 0
        in_middle = store.split.growing(lengths) if isinstance(store, SplitStore) else lengths
        if (is_split or is_quantized) and not in_pieces:
            # A first chunk attends to its own states, which are not quantized yet where the CPU attends.
            scratch = Scratch.planned_bytes(shape, lengths if is_quantized and not on_cpu and not later else later)
            of_middle = Scratch.planned_bytes(shape, in_middle) if is_split and is_quantized else 0
        if store.streamed is not None:
            layouts = store.layout.growing(in_middle)
            sizes = [each.quantized_blocks for each in layouts] if is_quantized else in_middle
            slots = store.streamed.staging.planned_bytes(store.streamed.shape, num_layers, sizes)
        while_decoding = slots + (of_middle if is_split or attends_in_place else scratch)
        return cls(
            kept,
            shared_prefill=slots + scratch,
            shared_decode=0 if is_all_on_cpu else while_decoding,
            copied=lengths[-1] * sum(shape.token_bytes) if is_copied else 0,
        )
