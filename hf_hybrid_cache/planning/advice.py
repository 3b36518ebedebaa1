"""What would fit where a cache does not: for errors of a cache that has its tokens already, or some of them."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..codecs import minmax
from ..layers import LayerStores, Placement
from ..storage import InitialCapacity, KVCodec, KVShape, address_space_is_limited
from .candidates import BITS
from .cost import HOST, LayerCost

_META = torch.device("meta")
# Of what is free: the rest is for what a prompt in chunks takes for a moment and allocators keep. Under a limit on the
# process buffers are copied to grow, which leaves holes.
_USABLE, _USABLE_WITH_COPIES = 7 / 8, 1 / 2


def advice(
    placement: Placement,
    codecs: Mapping[int, KVCodec],
    shapes: Mapping[int, KVShape],
    num_tokens: int,
    least_tokens: int,
    host_bytes: int,
) -> str:
    """
    What to do if `num_tokens` are more than fit in host memory.

    Args:
        placement: of the cache.
        codecs: of its layers that are coded.
        shapes: of all layers of full attention.
        num_tokens: that are wanted.
        least_tokens: that are known to fit.
        host_bytes: for the cache in all.

    Returns:
        How many tokens fit, and the quantized cache that loses least of those that would hold all, if one does.
    """
    usable = (_USABLE_WITH_COPIES if address_space_is_limited() else _USABLE) * host_bytes

    def does_not_fit(tokens: int) -> bool:
        return _host_bytes(placement, codecs, shapes, tokens) > usable

    fitting = least_tokens + bisect_left(range(least_tokens + 1, num_tokens), True, key=does_not_fit)
    sentences = [f"At least {fitting:,} tokens fit as it is."] if fitting else []
    placement = replace(placement, resident_layers=0, pin_memory=None)
    for bits in BITS.values():
        codec = None if bits is None else minmax(bits)
        if codec is None or codec in codecs.values():
            continue
        need = _host_bytes(placement, dict.fromkeys(shapes, codec), shapes, num_tokens)
        if need <= usable:
            cache = f"QuantizedHybridCache({', '.join(['config', f'bits={bits}', *_options(placement)])})"
            sentences.append(f"{cache} would hold {num_tokens:,} in {need / 2**30:.2f} GiB.")
            break
    return " ".join(sentences)


def _host_bytes(
    placement: Placement, codecs: Mapping[int, KVCodec], shapes: Mapping[int, KVShape], num_tokens: int
) -> int:
    """At most, while a prompt in chunks, or the tokens after it, bring all layers to `num_tokens`."""
    stores = LayerStores(placement, InitialCapacity(), len(shapes), codecs)
    lengths = [1, num_tokens]
    kept = shared = moved = 0
    for index, shape in shapes.items():
        on_cpu = shape.device == HOST
        planned = shape if on_cpu else shape._replace(device=_META)
        layer = LayerCost.of(stores, index, planned, len(shapes), lengths)
        kept += layer.kept[HOST.type]
        shared = max(shared, layer.shared_prefill * on_cpu)
        # A layer that is taken out of its blocks, and one that is copied to where there is room.
        moved = max(moved, layer.copied + layer.kept[HOST.type])
    return kept + shared + moved


def _options(placement: Placement) -> list[str]:
    options = ["offload=True"] if placement.offload else []
    if placement.cpu_layers:
        options.append(f"cpu_decode={sorted(placement.cpu_layers)}")
    elif placement.adapts:
        options.append('cpu_decode="auto"')
    elif placement.cpu_decode is not None:
        options.append(f"cpu_decode={placement.cpu_decode}")
    return options
