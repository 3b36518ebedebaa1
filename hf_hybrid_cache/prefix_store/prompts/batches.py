"""Several prompts in one cache: each is read alone, and its states are placed in its row."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cache import HybridCache, contents_of
from ...layers import HybridLayer, copy_of, put_back, side_by_side
from ...storage import BlockSegment, LayerStore, Part
from ...token_ids import TokenIds, as_token_ids
from ..errors import PrefixStoreError
from .checks import require_new


@dataclass
class Batch:
    """
    An empty cache that gets the states of several prompts, which end at the same position, row by row.

    Attributes:
        cache: of all rows.
        token_ids: `[batch, tokens]`, padded on the left.
        paddings: of each row, in tokens.
        empty: a cache of the same form.
    """

    cache: HybridCache
    token_ids: torch.Tensor
    paddings: list[int]
    empty: HybridCache
    _segments: dict[int, dict[str, BlockSegment]] = field(default_factory=dict)
    _plain_layers: dict[int, list[Any]] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        input_ids: TokenIds,
        cache: HybridCache,
        attention_mask: torch.Tensor | None,
        document_tokens: int,
    ) -> "Batch":
        """
        Check all arguments of `PrefixStore.prefill_batch`, but for the model's identity.

        Raises:
            PrefixStoreError: the prompts, or those of this model or cache, cannot be kept, or not in one cache.
        """
        require_new(cache)
        if cache.group is not None:
            raise PrefixStoreError(
                "Several processes keep shares of this cache, and a row is read by one. Use prefill for each prompt."
            )
        token_ids = as_token_ids("input_ids", input_ids).cpu()
        paddings = [0] * len(token_ids) if attention_mask is None else _paddings(token_ids, attention_mask)
        lengths = [token_ids.shape[1] - padding for padding in paddings]
        if min(lengths, default=0) < 2:
            raise PrefixStoreError(
                f"A prompt has at least two tokens, of which generate computes one; the rows have {lengths}."
            )
        if not 0 <= document_tokens < min(lengths):
            raise PrefixStoreError(
                f"document_tokens must be 0 to {min(lengths) - 1:,}, less than the shortest row has, got "
                f"{document_tokens:,}."
            )
        _require_common_codecs(cache, paddings)
        return cls(cache, token_ids, paddings, copy.deepcopy(cache))

    @property
    def prompts(self) -> Iterator[torch.Tensor]:
        """The rows without their padding, each `[1, tokens]`."""
        return (row[None, padding:] for row, padding in zip(self.token_ids, self.paddings, strict=True))

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let `place` be called for each row inside; after an error the cache is empty again."""
        try:
            yield
            self._finish()
        except BaseException:
            self.cache.reset()
            raise

    def place(self, row: int, alone: HybridCache) -> None:
        """Copy what a cache has of the prompt of a row into that row."""
        layers = zip(contents_of(self.cache).layers, contents_of(alone).layers, strict=True)
        for index, (layer, own) in enumerate(layers):
            if not isinstance(own, HybridLayer):
                self._plain_layers.setdefault(index, []).append(copy_of(own))
            elif own.store is not None:
                parts = _store_of(own).parts()
                if index not in self._segments:
                    self._segments[index] = self._make_segments(layer, own, parts, self.paddings[row])
                for name, part in parts.items():
                    _place_part(self._segments[index][name], row, part, self.paddings[row])

    def _finish(self) -> None:
        """Let the layers have what was placed."""
        contents, held_tokens = contents_of(self.cache), self.token_ids.shape[1] - 1
        for index, rows in self._plain_layers.items():
            try:
                put_back(contents.layers[index], side_by_side(rows, held_tokens))
            except ValueError as error:
                raise PrefixStoreError(
                    f"Layer {index} cannot hold several prompts: {error}. Use one cache for each prompt."
                ) from error
        for index, segments in self._segments.items():
            _store_of(contents.layers[index]).take_parts(segments)
        contents.stores.sees_as_alone = True
        self.cache.note_tokens(self.token_ids[:, :held_tokens])

    def _make_segments(
        self, layer: HybridLayer, own: HybridLayer, parts: dict[str, Part], padding: int
    ) -> dict[str, BlockSegment]:
        """Make the segments of a layer for all rows."""
        store, segments = layer.start(_store_of(own).shape._replace(batch=len(self.paddings))), {}
        for name, part in store.parts().items():
            entries = padding + parts[name].num_entries
            segments[name] = part.own_segment or BlockSegment.like(part.form, entries)
            segments[name].make_rows(entries)
        return segments


def _store_of(layer: HybridLayer) -> LayerStore:
    assert isinstance(layer.store, LayerStore)
    return layer.store


def _place_part(segment: BlockSegment, row: int, part: Part, padding: int) -> None:
    """Copy entries of one sequence into a row of a segment, after zeros."""
    shifted = BlockSegment.like(part.form, segment.num_tokens)
    shape = shifted.shape
    shifted.extend(
        torch.zeros(1, shape.num_kv_heads, padding, shape.key_dim, dtype=shape.key_dtype),
        torch.zeros(1, shape.num_kv_heads, padding, shape.value_dim, dtype=shape.value_dtype),
    )
    for run in part.runs:
        shifted.extend_from(*run)
    assert shifted.num_tokens == segment.num_tokens
    for rows, own in zip(segment.rows(), shifted.rows(), strict=True):
        rows[:, row] = own[:, 0]


def _paddings(token_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[int]:
    """
    Return the padding of each row by its mask.

    Raises:
        PrefixStoreError: there is padding elsewhere than on the left, or the mask is no such mask.
    """
    mask = torch.as_tensor(attention_mask).cpu()
    if mask.shape != token_ids.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise PrefixStoreError(
            f"attention_mask must be 0 or 1 for each of input_ids, {list(token_ids.shape)}, got {list(mask.shape)} of "
            f"{mask.dtype}."
        )
    tokens = mask.shape[1]
    paddings: list[int] = (tokens - (mask != 0).sum(dim=1)).tolist()
    for row, padding in enumerate(paddings):
        if bool((mask[row, padding:] == 0).any()):
            raise PrefixStoreError(
                f"The {tokens - padding:,} tokens of row {row} are not the last ones of its {tokens:,} positions, and "
                "generate goes on after the last position. Pad on the left: tokenizer.padding_side = 'left'."
            )
    return paddings


def _require_common_codecs(cache: HybridCache, paddings: list[int]) -> None:
    """
    Check that all rows can have the codecs of a cache, and its blocks.

    Raises:
        PrefixStoreError: they cannot.
    """
    ways_out = "Use a cache in full precision, or one cache for each prompt"
    if any(not codec.is_fitted for codec in cache.asked_codecs.values()):
        raise PrefixStoreError(
            "Each prompt chooses the codecs of a quantized cache by its own states, and a layer has one for all rows. "
            f"{ways_out}, or codecs that are chosen already: HybridCache(config, codec=minmax(4, rotate=True)), or "
            "codec=other.codecs of a cache that has read such a text."
        )
    if cache.asked_codecs and any(paddings):
        raise PrefixStoreError(
            "A quantized cache counts its first tokens, which stay in full precision, and its blocks of 64 from the "
            f"first position, padding included; the rows have {paddings} tokens of padding. {ways_out}, or prompts of "
            "equal length."
        )
