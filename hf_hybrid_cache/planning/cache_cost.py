"""The cost of a cache: the bytes that it holds, computed by the cache's own stores."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..layers import HOST, LayerCost, LayerStores, Placement
from ..storage import InitialCapacity, KVCodec, KVShape
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
        copied: host memory for the states of one layer, which the prompt's last chunk unpacks from the kernel's blocks.
    """

    prefill: Held
    decode: Held
    copied: int


def stock_cost(model: ModelCost, context: int, on_cpu: bool) -> CacheCost:
    """The cost of transformers' `DynamicCache`, which copies a prompt for each sequence that continues it."""
    prompt = model.prompt_tokens(context)
    prefill, decode = (
        tokens * sum(sum(shape.token_bytes) for shape in each.shapes.values()) + each.held_by_others(tokens)
        for tokens, each in ((prompt, model), (context, model.repeated()))
    )
    return CacheCost(Held.where(on_cpu, prefill), Held.where(on_cpu, decode), 0)


def cache_cost(model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool) -> CacheCost:
    """
    The cost of a `HybridCache` that has read a prompt, chunk by chunk, and then was continued up to `context` tokens.

    Where several sequences can share the prompt (`Place.can_be_continued`), its whole blocks are held once;
    elsewhere it is copied for each sequence.

    Args:
        model: the model that uses the cache.
        placement: of the cache, without resident layers.
        codec: of all full-attention layers; `None` for full precision.
        context: number of tokens of each sequence.
        on_cpu: whether the model computes on the CPU; otherwise it does on a CUDA device.
    """
    prompt = model.prompt_tokens(context)
    cost = _cost(model, placement, codec, model.lengths(prompt), on_cpu)
    if model.continuations == 1:
        return cost
    own = _own_bytes(model, placement, codec, context, on_cpu)
    if own is None:
        later = _cost(model.repeated(), placement, codec, range(prompt, context + 1), on_cpu)
        return replace(cost, decode=later.decode)
    others = model.repeated().held_by_others(context) - model.held_by_others(prompt)
    more = Held.where(on_cpu, others + own["meta"], own["cpu"])
    return replace(cost, decode=Held(cost.decode.device + more.device, cost.decode.host + more.host))


def _cost(
    model: ModelCost, placement: Placement, codec: KVCodec | None, lengths: Sequence[int], on_cpu: bool
) -> CacheCost:
    """The cost of a `HybridCache` that has had so many tokens in turn."""
    stores = _stores(model, placement, codec)
    kept: Counter[str] = Counter()
    # All layers use the shared memory in turn, so the largest layer counts.
    shared_prefill = shared_decode = copied = 0
    for index, shape, num_layers in _kinds_of_layers(model, on_cpu):
        layer = LayerCost.of(stores, index, shape, num_layers, lengths)
        kept.update({device: num_layers * num_bytes for device, num_bytes in layer.kept.items()})
        shared_prefill = max(shared_prefill, layer.shared_prefill)
        shared_decode = max(shared_decode, layer.shared_decode)
        copied = max(copied, layer.copied)
    others = model.held_by_others(lengths[-1])
    prefill, decode = (
        Held.where(on_cpu, kept["meta"] + others + shared, kept["cpu"]) for shared in (shared_prefill, shared_decode)
    )
    return CacheCost(prefill, decode, copied)


def _own_bytes(
    model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool
) -> Counter[str] | None:
    """Bytes that sequences hold besides what they share, by device type; `None` where they share nothing."""
    if not model.has_kernel:
        return None
    stores, own, prompt = _stores(model, placement, codec), Counter[str](), model.prompt_tokens(context)
    for index, shape, num_layers in _kinds_of_layers(model, on_cpu):
        place = stores.place_of(index, 0, shape)
        store = place.make(shape)
        shared = store.settled_after(model.lengths(prompt))
        if not place.can_be_continued(store, shared):
            return None
        tails = place.make(shape._replace(batch=model.continuations * shape.batch), after_prefix=True)
        for device, num_bytes in tails.planned_bytes(range(prompt - shared, context - shared + 1)):
            own[device.type] += num_layers * num_bytes
    return own


def _stores(model: ModelCost, placement: Placement, codec: KVCodec | None) -> LayerStores:
    """The stores of a cache for the model."""
    if not model.has_kernel:
        placement = replace(placement, cpu_decode=False)  # a cache does the same once attention asks for the states
    codecs = dict.fromkeys(model.shapes, codec) if codec is not None else {}
    return LayerStores(placement, InitialCapacity.expecting(None, model.max_context), len(model.shapes), codecs)


def _kinds_of_layers(model: ModelCost, on_cpu: bool) -> Iterator[tuple[int, KVShape, int]]:
    """The index of a layer of each shape, its shape where the model computes, and the number of such layers."""
    for shape, num_layers in Counter(model.shapes.values()).items():
        index = next(index for index, each in model.shapes.items() if each == shape)
        yield index, shape._replace(device=HOST) if on_cpu else shape, num_layers
