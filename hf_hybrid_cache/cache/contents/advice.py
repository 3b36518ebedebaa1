"""Advice for a cache that has run out of host memory: how many tokens fit, and which quantized cache would fit."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...codecs import minmax
from ...layers import HOST, LayerCost, LayerStores, Placement
from ...storage import InitialCapacity, KVCodec, KVShape, address_space_is_limited

_META = torch.device("meta")
_BITS: Sequence[int | tuple[int, int]] = (8, 4, (4, 2), 2)
# Shares of the free memory that a cache can use. Allocators and a prompt's chunks need the rest. Under a limit on the
# address space buffers are copied to grow, which leaves holes.
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
    Say what to do if `num_tokens` do not fit in host memory.

    Args:
        placement: of the cache.
        codecs: of its quantized layers, by index.
        shapes: of the keys and values of all full-attention layers, by index.
        num_tokens: the number of tokens that do not fit.
        least_tokens: a number of tokens that is known to fit.
        host_bytes: host memory for the whole cache.

    Returns:
        Sentences that say how many tokens fit, and which quantized cache would hold all of them: the one with the most
        bits, if there is one.
    """
    usable = (_USABLE_WITH_COPIES if address_space_is_limited() else _USABLE) * host_bytes

    def does_not_fit(tokens: int) -> bool:
        return _host_bytes(placement, codecs, shapes, tokens) > usable

    fitting = least_tokens + bisect_left(range(least_tokens + 1, num_tokens), True, key=does_not_fit)
    sentences = [f"At least {fitting:,} tokens fit as it is."] if fitting else []
    placement = replace(placement, resident_layers=0, pin_memory=None)
    for bits in _BITS:
        codec = minmax(bits)
        if codec in codecs.values():
            continue
        need = _host_bytes(placement, dict.fromkeys(shapes, codec), shapes, num_tokens)
        if need <= usable:
            cache = f"QuantizedHybridCache({', '.join(['config', f'bits={bits}', *_options(placement)])})"
            if placement.cpu_layers:
                cache = f"HybridCache(config, Placement({', '.join(_options(placement))}), codec=minmax({bits}))"
            sentences.append(f"{cache} would hold {num_tokens:,} in {need / 2**30:.2f} GiB.")
            break
    return " ".join(sentences)


def _host_bytes(
    placement: Placement, codecs: Mapping[int, KVCodec], shapes: Mapping[int, KVShape], num_tokens: int
) -> int:
    """The most host memory that the cache needs while all layers grow to `num_tokens`."""
    stores = LayerStores(placement, InitialCapacity(), len(shapes), codecs)
    lengths = [1, num_tokens]
    kept = shared = moved = 0
    for index, shape in shapes.items():
        on_cpu = shape.device == HOST
        planned = shape if on_cpu else shape._replace(device=_META)
        layer = LayerCost.of(stores, index, planned, len(shapes), lengths)
        kept += layer.kept[HOST.type]
        shared = max(shared, layer.shared_prefill * on_cpu)
        # One layer may be unpacked from its blocks while its buffers are copied to larger ones.
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
