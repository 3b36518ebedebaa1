"""The cost of a cache: the bytes that it holds, computed by the cache's own stores."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..decode_phase.moving import HOST
from ..layers import LayerStores, Placement
from ..storage import InitialCapacity, KVCodec, KVShape, Scratch, SplitStore
from .model_cost import ModelCost


class Held(NamedTuple):
    """Bytes held in the memory of an accelerator, and in host memory."""

    device: int
    host: int

    @classmethod
    def where(cls, on_cpu: bool, num_bytes: int, host_bytes: int = 0) -> "Held":
        """So many bytes where the model computes, and more in host memory."""
        return cls(0, num_bytes + host_bytes) if on_cpu else cls(num_bytes, host_bytes)


@dataclass(frozen=True)
class CacheCost:
    """
    The cost of a cache at one context length.

    Attributes:
        prefill: bytes held at the end of the prompt.
        decode: bytes held while tokens are decoded, as `memory()` reports them.
    """

    prefill: Held
    decode: Held


def stock_cost(model: ModelCost, context: int, on_cpu: bool) -> CacheCost:
    """The cost of transformers' `DynamicCache`."""
    held = context * sum(sum(shape.token_bytes) for shape in model.shapes.values()) + model.held_by_others(context)
    return CacheCost(Held.where(on_cpu, held), Held.where(on_cpu, held))


def cache_cost(model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool) -> CacheCost:
    """
    The cost of a `HybridCache` that has read a context, chunk by chunk.

    Args:
        model: the model that uses the cache.
        placement: of the cache.
        codec: of all full-attention layers; `None` for full precision.
        context: number of tokens of each sequence.
        on_cpu: whether the model computes on the CPU; otherwise it does on a CUDA device.
    """
    if not model.has_kernel:
        placement = replace(placement, cpu_decode=False)  # a cache does the same once attention asks for the states
    codecs = dict.fromkeys(model.shapes, codec) if codec is not None else {}
    capacity = InitialCapacity.expecting(None, model.max_context)
    stores = LayerStores(placement, capacity, model.shapes, model.others, codecs)
    lengths = model.lengths(context)
    kept: Counter[str] = Counter()
    # All layers use the shared memory in turn, so the largest layer counts.
    shared_prefill = shared_decode = 0
    for index, shape, num_layers in _kinds_of_layers(model, on_cpu):
        alone, *in_turn = _layer_cost(stores, index, shape, num_layers, lengths)
        kept.update({device: num_layers * num_bytes for device, num_bytes in alone.items()})
        shared_prefill, shared_decode = map(max, (shared_prefill, shared_decode), in_turn)
    kept.update(_held_by_others(model, stores, lengths, on_cpu))
    prefill, decode = (
        Held.where(on_cpu, kept["meta"] + shared, kept["cpu"]) for shared in (shared_prefill, shared_decode)
    )
    return CacheCost(prefill, decode)


def _held_by_others(model: ModelCost, stores: LayerStores, lengths: Sequence[int], on_cpu: bool) -> Counter[str]:
    """Bytes of the layers without full attention, by device type, after so many tokens in turn."""
    held: Counter[str] = Counter()
    for layer in model.others.values():
        if layer.shape is None or layer.window is None:
            held["cpu" if on_cpu else "meta"] += layer.held_bytes(lengths[-1])
            continue
        shape = layer.shape._replace(device=HOST) if on_cpu else layer.shape
        store = stores.place_of_window(layer.window, shape).make(shape)
        for device, num_bytes in store.planned_bytes(lengths):
            held[device.type] += num_bytes
    return held


def _kinds_of_layers(model: ModelCost, on_cpu: bool) -> Iterator[tuple[int, KVShape, int]]:
    """The index of a layer of each shape, its shape where the model computes, and the number of such layers."""
    for shape, num_layers in Counter(model.shapes.values()).items():
        index = next(index for index, each in model.shapes.items() if each == shape)
        yield index, shape._replace(device=HOST) if on_cpu else shape, num_layers


def _layer_cost(
    stores: LayerStores, index: int, shape: KVShape, num_layers: int, lengths: Sequence[int]
) -> tuple[Counter[str], int, int]:
    """
    The cost of a layer that has had so many tokens in turn; `num_layers` are of its shape.

    The bytes that it holds alone, by device type; and bytes on the compute device that layers use in turn, at the end
    of the prompt and while tokens are decoded.
    """
    place = stores.place_of(index, shape)
    store = place.make(shape)
    is_split, is_quantized = isinstance(store, SplitStore), store.layout.is_quantized
    kept: Counter[str] = Counter()
    for device, num_bytes in store.planned_bytes(lengths):
        kept[device.type] += num_bytes
    on_cpu, attends_in_place = place.on_cpu, place.on_cpu or place.on_codes
    is_all_on_cpu = on_cpu and stores.cpu_fraction is None
    # Attention of a chunk then unpacks few blocks at a time.
    in_pieces = is_all_on_cpu and shape.device == HOST
    later = lengths[1:]
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
    shared_decode = 0 if is_all_on_cpu else while_decoding
    return kept, slots + scratch, shared_decode
