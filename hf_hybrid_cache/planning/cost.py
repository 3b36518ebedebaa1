"""What a cache costs a model: bytes that it holds, and those that a step reads. Asked of the stores it is made of."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..layers import LayerStores, Placement
from ..storage import (
    CodedStore,
    InitialCapacity,
    KVCodec,
    KVShape,
    KVStore,
    Scratch,
    SplitStore,
    StreamedStore,
    coded_blocks,
)
from .model_cost import ModelCost

HOST = torch.device("cpu")


class Held(NamedTuple):
    """Bytes in the memory of an accelerator, and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class CacheCost:
    """
    What a cache costs at one context.

    Attributes:
        prefill: held at the end of the prompt.
        decode: held while tokens are decoded, as `memory()` reports it.
        copied: states of one layer that the last chunk of the prompt takes out of the kernel's blocks, in host memory.
        read_bytes: of the full-attention layers, as they are stored, all of which a step reads.
        moved_bytes: what a step reads and writes for them in all.
        other_bytes: of the other layers.
    """

    prefill: Held
    decode: Held
    copied: int
    read_bytes: int
    moved_bytes: int
    other_bytes: int


def stock_cost(model: ModelCost, context: int, on_cpu: bool) -> CacheCost:
    """What transformers' `DynamicCache` costs; arguments are those of `cache_cost`."""
    read = sum(context * sum(_token_bytes(shape)) for shape in model.shapes.values())
    others = model.held_by_others(context)
    held = Held(0, read + others) if on_cpu else Held(read + others, 0)
    # It copies all that is stored, which is a read and a write, before it is read again.
    return CacheCost(held, held, 0, read, 3 * read, others)


def cache_cost(model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool) -> CacheCost:
    """
    What a `HybridCache` costs when a prompt in chunks, or the tokens after it, have brought it to `context` tokens.

    Args:
        model: whose cache it is.
        placement: of the cache.
        codec: of all full-attention layers.
        context: tokens of each sequence.
        on_cpu: the model computes on the CPU; `False` is on a CUDA device.
    """
    if not model.has_kernel:
        placement = replace(placement, cpu_decode=False)  # as a cache does once attention asks for the states
    codecs = dict.fromkeys(model.shapes, codec) if codec is not None else {}
    capacity = InitialCapacity.expecting(None, model.max_context)
    resident_ordinals = placement.resident_ordinals(len(model.shapes))
    are_resident = (placement.offload and not placement.attends_on_cpu(0, on_cpu)) or placement.cpu_share is not None
    resident = Counter(shape for ordinal, shape in enumerate(model.shapes.values()) if ordinal in resident_ordinals)
    stores, stores_of_resident = (
        LayerStores(each, capacity, len(model.shapes), codecs)
        for each in (replace(placement, resident_layers=0), Placement(offload=True, cpu_decode=False))
    )
    others = model.held_by_others(context)
    kept = Counter({HOST.type if on_cpu else "meta": others})
    # Layers take turns in what they share, so that the largest counts.
    shared_prefill = shared_decode = copied = read = moved = 0
    for meta_shape, num_layers in Counter(model.shapes.values()).items():
        index = next(index for index, shape in model.shapes.items() if shape == meta_shape)
        shape = meta_shape._replace(device=HOST) if on_cpu else meta_shape
        lengths = model.lengths(context)
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
    """Bytes of one layer's states, of `shape` and coded by `codec`, in the blocks that the CPU kernel reads."""
    stores = LayerStores(Placement(), InitialCapacity(), 1, {} if codec is None else {0: codec})
    store = stores.make(0, 0, shape._replace(device=HOST))
    return sum(num_bytes for _, num_bytes in store.planned_bytes([num_tokens]))


class LayerCost(NamedTuple):
    """
    What one layer costs.

    Attributes:
        kept: bytes by type of device.
        shared_prefill: bytes on the compute device that layers take turns in, at the end of the prompt.
        shared_decode: likewise, while tokens are decoded.
        copied: see `CacheCost`.
        moved: bytes of states that a step decodes, which writes and reads them.
        slots: of `shared_prefill`, the copies of layers that are streamed.
    """

    kept: Counter[str]
    shared_prefill: int
    shared_decode: int
    copied: int
    moved: int
    slots: int

    @classmethod
    def of(cls, stores: LayerStores, index: int, shape: KVShape, num_layers: int, lengths: list[int]) -> "LayerCost":
        """Of the layer `index`, one of `num_layers` of this shape, after growing to each of `lengths`."""
        store = stores.make(index, 0, shape)
        kept: Counter[str] = Counter()
        for device, num_bytes in store.planned_bytes(lengths):
            kept[device.type] += num_bytes
        attends_on_cpu = stores.attends_on_cpu(index, 0, shape)
        attends_in_place = attends_on_cpu or stores.attends_in_codes(index, 0, shape)
        all_states = lengths[-1] * sum(_token_bytes(shape))
        # Attention of a chunk then takes some of the blocks at a time, which is little.
        is_streamed = not attends_on_cpu or stores.cpu_share is not None
        takes_some = stores.attention.has_kernel_for_many(shape) or shape.key_dim == shape.value_dim
        in_pieces = not is_streamed and shape.device == HOST and takes_some
        slots = scratch = of_middle = copied = moved = 0
        entries: KVStore = store
        sizes = lengths
        if isinstance(store, SplitStore):
            # All states are put together for a chunk of a prompt, where it is not attended to in pieces.
            if not in_pieces:
                scratch = sum(Scratch.planned_bytes([n * size for n in lengths[1:]]) for size in _token_bytes(shape))
            entries, sizes = store.host, store.planned_host_tokens(lengths)
            if isinstance(entries, CodedStore) and not in_pieces:
                of_middle = sum(Scratch.planned_bytes([n * size for n in sizes]) for size in _token_bytes(shape))
        if isinstance(entries, CodedStore):
            sizes = [coded_blocks(entries.codec, length) for length in sizes]
            entries = entries.records
            moved = 0 if attends_in_place else 2 * all_states
            # The first chunk is attended to as it comes.
            later = lengths[1:] if attends_on_cpu else lengths[1:] or lengths
            if not in_pieces:
                scratch = sum(Scratch.planned_bytes([n * size for n in later]) for size in _token_bytes(shape))
        elif attends_on_cpu and shape.device == HOST and not in_pieces and len(lengths) > 1:
            copied = all_states
        if isinstance(entries, StreamedStore):
            slots = entries.staging.planned_bytes(entries.shape, num_layers, sizes)
        is_put_together = not attends_in_place and not isinstance(store, SplitStore)
        while_decoding = slots + of_middle + (scratch if is_put_together else 0) if is_streamed else 0
        return cls(kept, slots + scratch, while_decoding, copied, moved, slots)


def _token_bytes(shape: KVShape) -> tuple[int, int]:
    """Bytes of the keys, and of the values, of one token."""
    heads = shape.batch * shape.num_kv_heads
    return heads * shape.key_dim * shape.key_dtype.itemsize, heads * shape.value_dim * shape.value_dtype.itemsize
