"""The cost of a cache when several sequences continue one prompt."""

from collections import Counter
from dataclasses import replace

from ..layers import LayerStores, Placement
from ..storage import InitialCapacity, KVCodec
from .cost import HOST, CacheCost, Held, cache_cost, stock_cost
from .model_cost import ModelCost


def continued_stock_cost(model: ModelCost, context: int, on_cpu: bool) -> CacheCost:
    """The cost of transformers' `DynamicCache`, which copies the prompt for each sequence."""
    prompt = stock_cost(model, model.prompt_tokens(context), on_cpu)
    return replace(prompt, decode=stock_cost(model.repeated(), context, on_cpu).decode)


def continued_cost(
    model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool
) -> CacheCost:
    """
    The cost of a `HybridCache` that has read a prompt, and then was continued by several sequences up to `context`.

    Where sequences share a prompt (`LayerStores.can_be_continued`), its whole blocks are held once; elsewhere it is
    copied for each sequence.
    All but `decode` is of the prompt. The arguments are those of `cache_cost`; layers are not divided.
    """
    prompt = model.prompt_tokens(context)
    cost = cache_cost(model, placement, codec, prompt, on_cpu)
    own = _own_bytes(model, placement, codec, context, on_cpu)
    if own is None:
        lengths = range(prompt, context + 1)
        return replace(cost, decode=cache_cost(model.repeated(), placement, codec, context, on_cpu, lengths).decode)
    others = model.repeated().held_by_others(context) - model.held_by_others(prompt)
    more = Held(own["meta"], own["cpu"] + others) if on_cpu else Held(own["meta"] + others, own["cpu"])
    return replace(cost, decode=Held(cost.decode.device + more.device, cost.decode.host + more.host))


def _own_bytes(
    model: ModelCost, placement: Placement, codec: KVCodec | None, context: int, on_cpu: bool
) -> Counter[str] | None:
    """Bytes that sequences hold besides what they share, by device type; `None` where they share nothing."""
    if not model.has_kernel:
        return None
    codecs = {} if codec is None else dict.fromkeys(model.shapes, codec)
    stores = LayerStores(placement, InitialCapacity.expecting(None, model.max_context), len(model.shapes), codecs)
    own: Counter[str] = Counter()
    for meta_shape, num_layers in Counter(model.shapes.values()).items():
        index = next(index for index, shape in model.shapes.items() if shape == meta_shape)
        shape = meta_shape._replace(device=HOST) if on_cpu else meta_shape
        prompt, store = model.prompt_tokens(context), stores.make(index, 0, shape)
        shared = store.layout.growing(model.lengths(prompt))[-1].settled_tokens(prompt)
        if not stores.can_be_continued(store, shared, stores.attends_on_cpu(index, 0, shape)):
            return None
        tails = stores.make(index, 0, shape._replace(batch=model.continuations * shape.batch), after_prefix=True)
        for device, num_bytes in tails.planned_bytes(range(prompt - shared, context - shared + 1)):
            own[device.type] += num_layers * num_bytes
    return own
