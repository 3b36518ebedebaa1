"""New tokens on their way into a layer's segments: where each goes is decided, and quantized, before any is stored."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .joined_states import JoinedStates
from .kv_store import Pair
from .layout import Layout
from .memory.growth import GRANULE

if TYPE_CHECKING:
    from .store import Store


class Arrival(NamedTuple):
    """
    Entries to store in the segments of a layer.

    Attributes:
        layout: layout with the new tokens.
        new_tokens: number of new tokens.
        bulk: entries for the bulk segment.
        moves: whether there are any.
        removed: tokens that leave the device, after the first ones.
        staying: new states that go to the device.
        kept: tokens in full precision that stay beside quantized blocks.
        recent: keys and values that follow these; `None` where nothing is quantized.
        pending: keys and values that wait for the choice of the codec.
    """

    layout: Layout
    new_tokens: int
    bulk: Pair
    moves: bool = True
    removed: int = 0
    staying: Sequence[Pair] = ()
    kept: int = 0
    recent: Pair | None = None
    pending: Pair | None = None

    def through_device(self, store: "Store", keys: torch.Tensor, values: torch.Tensor) -> "Arrival":
        """Let new states go to the device, and those that leave it go to the middle."""
        on_device = store.ends
        assert on_device is not None
        count, held = self.layout.host_tokens - store.layout.host_tokens, on_device.num_entries
        first, missing = store.first_tokens, min(self.layout.first_tokens - store.first_tokens, self.new_tokens)
        leaving = [
            JoinedStates(old[:, :, first:], new[:, :, missing:])[:count]
            for old, new in zip(on_device.read(), (keys, values), strict=True)
        ]
        if count <= held - first:  # their copy may still run when others take their places
            leaving = [states.clone() for states in leaving]
        removed = min(count, held - first)
        skipped = count - removed
        ranges = ((0, missing), (missing + skipped, self.new_tokens)) if skipped else ((0, self.new_tokens),)
        staying = [(keys[:, :, start:end], values[:, :, start:end]) for start, end in ranges]
        return self._replace(bulk=(leaving[0], leaving[1]), moves=count > 0, removed=removed, staying=staying)

    def waiting(self, store: "Store") -> "Arrival":
        """Let states that are due wait until the codec is chosen; all checks come first."""
        quantized = store.quantized
        assert quantized is not None
        count = self.layout.own_quantized_blocks - quantized.num_blocks
        store.dense.reserve(store.layout.most_full_tokens)
        quantized.packed.reserve(quantized.num_blocks + count)
        _require_finite(store, self.bulk, count)
        layout = replace(self.layout, quantized_blocks=store.layout.quantized_blocks)
        keys, values = self.bulk  # the caller's, who may write to them while they wait
        return self._replace(layout=layout, pending=(keys.clone(), values.clone()))

    def with_quantized(self, store: "Store") -> "Arrival":
        """
        Quantize the blocks that are due, on the device of the new states.

        Raises:
            ValueError: there are no codes for some of them.
        """
        quantized, full, (keys, values) = store.quantized, store.dense, self.bulk
        assert quantized is not None
        count = (self.layout.own_quantized_blocks - quantized.num_blocks) * GRANULE
        full.wait_for_copies()
        full.reserve(store.layout.most_full_tokens)
        if not count:
            # 63 of 64 steps quantize nothing, and a call of the codec would wait for the device.
            nothing = quantized.no_blocks(keys)
            return self._replace(bulk=nothing, moves=False, kept=full.num_entries, recent=self.bulk)
        if not quantized.is_chosen:
            choose_codec(store, keys, values)
        if not quantized.num_blocks:  # something may have ended the choice before it did so
            quantized.fit()
        # The sinks are followed by the other tokens in full precision so far, and then by the new ones.
        first, num_full = store.sink_tokens, full.num_entries
        missing = max(0, first - num_full)
        sequences = _after_sinks(store, keys, values)
        try:
            packed = quantized.encode(*sequences, count)
        except ValueError as error:
            raise _not_finite(store, count // GRANULE, str(error)) from None
        # A copy, because storing it overwrites its source.
        recent = [
            torch.cat([new[:, :, :missing], sequence[count:]], dim=2)
            for new, sequence in zip((keys, values), sequences, strict=True)
        ]
        return self._replace(bulk=packed, moves=True, kept=min(first, num_full), recent=(recent[0], recent[1]))


def choose_codec(store: "Store", keys: torch.Tensor, values: torch.Tensor) -> None:
    """
    Choose the codec by all states from the first block to quantize on, new ones included.

    Raises:
        ValueError: some of them are infinite or not a number.
    """
    assert store.quantized is not None
    sequences = _after_sinks(store, keys, values)
    _require_finite(store, (keys, values), len(sequences[0]) // GRANULE - 1)
    store.quantized.choose(*sequences)


def _after_sinks(store: "Store", keys: torch.Tensor, values: torch.Tensor) -> tuple[JoinedStates, JoinedStates]:
    """Return the states in full precision after the sinks, followed by new states."""
    first, num_full = store.sink_tokens, store.dense.num_entries
    olds = store.dense.read_range(min(first, num_full), num_full)
    of_keys, of_values = (
        JoinedStates(old.to(new.device), new[:, :, max(0, first - num_full) :])
        for old, new in zip(olds, (keys, values), strict=True)
    )
    return of_keys, of_values


def _require_finite(store: "Store", states: Pair, num_blocks: int) -> None:
    for each in states:
        # A sum is quick, but may be infinite although all numbers are finite.
        if not torch.isfinite(each.sum()) and not torch.isfinite(each).all():
            raise _not_finite(store, num_blocks, "infinite, or not a number")


def _not_finite(store: "Store", num_blocks: int, reason: str) -> ValueError:
    assert store.quantized is not None
    count = num_blocks * GRANULE
    end = store.layout.sink_tokens + store.quantized.num_blocks * GRANULE + count
    return ValueError(
        f"Some of the keys or values of the {count:,} tokens before token {end:,} are {reason}: no codes "
        "stand for such. Nothing was stored. Find out why the model computes them, or use a cache of full "
        "precision, such as DynamicHybridCache."
    )
