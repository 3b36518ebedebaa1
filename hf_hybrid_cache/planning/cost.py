"""The cost of a cache: the bytes that it holds and those that a step reads, computed by the cache's own stores."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..layers import LayerStores, Placement
from ..storage import InitialCapacity, KVCodec, KVShape, Scratch
from .model_cost import ModelCost

HOST = torch.device("cpu")


class Held(NamedTuple):
    """Bytes held in the memory of an accelerator, and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class CacheCost:
    """
    The cost of a cache at one context length.

    Attributes:
        prefill: bytes held at the end of the prompt.
        decode: bytes held while tokens are decoded, as `memory()` reports them.
        copied: host memory for the states of one layer, which the prompt's last chunk unpacks from the kernel's blocks.
        read_bytes: stored bytes of the full-attention layers; a decode step reads all of them.
        moved_bytes: all bytes that a step reads and writes for these layers, decoding of states included.
        other_bytes: bytes of the other layers.
    """

    prefill: Held
    decode: Held
    copied: int
    read_bytes: int
    moved_bytes: int
    other_bytes: int


def stock_cost(model: ModelCost, context: int, on_cpu: bool) -> CacheCost:
    """The cost of transformers' `DynamicCache`; the arguments are those of `cache_cost`."""
    read = sum(context * sum(shape.token_bytes) for shape in model.shapes.values())
    others = model.held_by_others(context)
    held = Held(0, read + others) if on_cpu else Held(read + others, 0)
    # A step copies all states, a read and a write, and then reads the copy.
    return CacheCost(held, held, 0, read, 3 * read, others)


def cache_cost(
    model: ModelCost,
    placement: Placement,
    codec: KVCodec | None,
    context: int,
    on_cpu: bool,
    lengths: Sequence[int] | None = None,
) -> CacheCost:
    """
    The cost of a `HybridCache` that has grown to `context` tokens, chunk by chunk.

    Args:
        model: the model that uses the cache.
        placement: of the cache.
        codec: of all full-attention layers; `None` for full precision.
        context: number of tokens of each sequence.
        on_cpu: whether the model computes on the CPU; otherwise it does on a CUDA device.
        lengths: numbers of tokens that it has in turn; `None` for those after each chunk.
    """
    lengths = model.lengths(context) if lengths is None else list(lengths)
    if not model.has_kernel:
        placement = replace(placement, cpu_decode=False)  # a cache does the same once attention asks for the states
    codecs = dict.fromkeys(model.shapes, codec) if codec is not None else {}
    capacity = InitialCapacity.expecting(None, model.max_context)
    resident_ordinals = placement.resident_ordinals(len(model.shapes))
    are_resident = (placement.offload and not placement.attends_on_cpu(0, on_cpu)) or placement.cpu_fraction is not None
    resident = Counter(shape for ordinal, shape in enumerate(model.shapes.values()) if ordinal in resident_ordinals)
    stores, stores_of_resident = (
        LayerStores(each, capacity, len(model.shapes), codecs)
        for each in (replace(placement, resident_layers=0), Placement(offload=True, cpu_decode=False))
    )
    others = model.held_by_others(context)
    kept = Counter({HOST.type if on_cpu else "meta": others})
    # All layers use the shared memory in turn, so the largest layer counts.
    shared_prefill = shared_decode = copied = read = moved = 0
    for meta_shape, num_layers in Counter(model.shapes.values()).items():
        index = next(index for index, shape in model.shapes.items() if shape == meta_shape)
        shape = meta_shape._replace(device=HOST) if on_cpu else meta_shape
        num_resident = resident[meta_shape] if are_resident else 0
        layer = LayerCost.of(stores, index, shape, num_layers - num_resident, lengths)
        kept.update({device: (num_layers - num_resident) * num_bytes for device, num_bytes in layer.kept.items()})
        if num_resident:
            each = LayerCost.of(stores_of_resident, index, shape, 1, lengths)
            kept.update({device: num_resident * num_bytes for device, num_bytes in each.kept.items()})
            kept.update({shape.device.type: num_resident * each.slots})
            shared_prefill = max(shared_prefill, each.shared_prefill - each.slots)
            shared_decode = max(shared_decode, each.shared_decode - each.slots)
        stored = layer_bytes(shape, codec, context)
        read += num_layers * stored
        moved += num_layers * (stored + layer.moved)
        shared_prefill = max(shared_prefill, layer.shared_prefill)
        shared_decode = max(shared_decode, layer.shared_decode)
        copied = max(copied, layer.copied)
    held = [
        Held(0, kept["cpu"] + shared) if on_cpu else Held(kept["meta"] + shared, kept["cpu"])
        for shared in (shared_prefill, shared_decode)
    ]
    return CacheCost(held[0], held[1], copied, read, moved, others)


def layer_bytes(shape: KVShape, codec: KVCodec | None, num_tokens: int) -> int:
    """Bytes of `num_tokens` tokens of one layer, quantized by `codec`, in the blocks that the CPU kernel reads."""
    stores = LayerStores(Placement(), InitialCapacity(), 1, {} if codec is None else {0: codec})
    store = stores.make(0, 0, shape._replace(device=HOST))
    return sum(num_bytes for _, num_bytes in store.planned_bytes([num_tokens]))


class LayerCost(NamedTuple):
    """
    The cost of one layer.

    Attributes:
        kept: bytes that the layer holds alone, by device type.
        shared_prefill: bytes on the compute device that layers use in turn, at the end of the prompt.
        shared_decode: bytes on the compute device that layers use in turn while tokens are decoded.
        copied: see `CacheCost`.
        moved: bytes that a step writes and reads because it decodes quantized states.
        slots: the part of `shared_prefill` that holds streamed layers.
    """

    kept: Counter[str]
    shared_prefill: int
    shared_decode: int
    copied: int
    moved: int
    slots: int

    @classmethod
    def of(cls, stores: LayerStores, index: int, shape: KVShape, num_layers: int, lengths: list[int]) -> "LayerCost":
        """The cost of the layer `index`, one of `num_layers` of this shape, after it has grown to each of `lengths`."""
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
        return cls(kept, slots + scratch, while_decoding, copied, moved, slots)
