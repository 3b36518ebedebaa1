"""Reading the states of a layer out of its segments: all together, from a token on, or in pieces."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .kv_store import Pair
from .memory.growth import GRANULE

if TYPE_CHECKING:
    from .store import Store


def put_together(store: "Store", states: Pair, bulk: Pair | None = None) -> Pair:
    """
    Write all own states of a layer into `states`, which were lent, and return them.

    Args:
        store: of the layer.
        states: `[batch, num_kv_heads, tokens, head_dim]` on the compute device.
        bulk: entries of the bulk segment on the compute device; `None` to read them.
    """
    on_device, first = store.ends, store.first_tokens
    last = first + states[0].shape[2] - (0 if on_device is None else on_device.num_entries)
    put_middle_together(store, _range_of(states, first, last), bulk)
    if on_device is not None:
        _put_ends(on_device.read(), states, first, last)
    return states


def put_middle_together(store: "Store", states: Pair, bulk: Pair | None = None) -> None:
    """Write the states of the middle into `states`; arguments are those of `put_together`."""
    quantized = store.quantized
    if quantized is None or quantized.pending:  # then nothing is quantized
        pieces = bulk or store.dense.read(), *store.pending
        for target, *sources in zip(states, *pieces, strict=True):
            torch.cat([source.to(target.device) for source in sources], dim=2, out=target)
        return
    first, last = _quantized_range(store)
    quantized.decode(quantized.packed.read() if bulk is None else bulk, _range_of(states, first, last))
    _put_ends(store.dense.read(), states, first, last)


def copy_from(store: "Store", start: int) -> Pair:
    """Copy the states from token `start`, which is not quantized, to memory of the compute device or the host."""
    store.wait_for_copies()
    first, last = _quantized_range(store)
    keys, values = store.dense.read_range(start - store.first_tokens - (last - first), store.dense.num_entries)
    if store.ends is None:
        return keys.clone(), values.clone()
    recent = store.ends.read_range(store.first_tokens, store.ends.num_entries)
    keys, values = (
        torch.cat([old.to(new.device), new], dim=2) for old, new in zip((keys, values), recent, strict=True)
    )
    return keys, values


def middle_in_pieces(store: "Store", size: int, cut: int) -> Iterator[tuple[int, Pair]]:
    """
    Yield the states of the middle in pieces, on their own device, with the first token of each.

    Args:
        store: of the layer, whose copies are done.
        size: tokens of a piece, at most, whole blocks.
        cut: token in a block, with which a piece begins.
    """
    first, last = _quantized_range(store)
    if first:
        yield 0, store.dense.read_range(0, first)
    if store.quantized is not None:
        for start, end in _ranges(first, last, size, cut):
            yield start, store.quantized.dequantized((start - first) // GRANULE, (end - first) // GRANULE)
    skipped, num_tokens = last - first, store.middle_tokens
    rest = (num_tokens, 0) if store.quantized is not None else (size, cut)
    for start, end in _ranges(last, num_tokens, *rest):
        yield start, store.dense.read_range(start - skipped, end - skipped)


def block_keys(store: "Store", first: int, last: int) -> torch.Tensor:
    """
    Return the keys of some blocks of the middle, by number, all quantized or none; its copies are done.

    Returns:
        `[batch, num_kv_heads, tokens, key_dim]`, dequantized.
    """
    if store.quantized is None:
        return store.dense.keys.read_range(first * GRANULE, last * GRANULE)
    sinks = store.sink_tokens // GRANULE
    return store.quantized.dequantized_keys(first - sinks, last - sinks)


def _quantized_range(store: "Store") -> tuple[int, int]:
    """Return the first token of the middle that is quantized, and the one after the last."""
    if store.quantized is None:
        return 0, 0
    first = min(store.dense.num_entries, store.sink_tokens)
    return first, first + store.quantized.num_blocks * GRANULE


def _range_of(states: Pair, first: int, last: int) -> Pair:
    return states[0][:, :, first:last], states[1][:, :, first:last]


def _put_ends(ends: Pair, states: Pair, first: int, last: int) -> None:
    """Write tokens of both ends around those from `first` to `last`."""
    for target, source in zip(states, ends, strict=True):
        target[:, :, :first] = source[:, :, :first]
        target[:, :, last:] = source[:, :, first:]


def _ranges(start: int, end: int, size: int, cut: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of `size`, whole blocks, from `start` to `end`; one ends where the block with `cut` begins."""
    cut = start + max(0, cut - start) // GRANULE * GRANULE
    while start < end:
        stop = min(start + size, end)
        if start < cut < stop:
            stop = cut
        yield start, stop
        start = stop
