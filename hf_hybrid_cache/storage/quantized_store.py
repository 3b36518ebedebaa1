"""Keys and values of one layer of which all but the first and the last tokens are quantized."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from .buffered_store import BufferedStore, LocalStore, WholePart
from .codec import Codec, CodecChoice, KVCodec
from .growth import GRANULE
from .joined_states import JoinedStates
from .kv_store import KVShape, Pair, ranges
from .layout import Layout
from .scratch import Scratch
from .shard import Shard
from .streamed_store import StreamedStore
from .token_buffer import TokenBuffer

_QUANTIZED_AT_ONCE = 64 * GRANULE
# Blocks by which a codec is chosen, spread over the first states that are quantized.
_SAMPLED_BLOCKS = 16

Added = TypeVar("Added")
_AddPacked = Callable[[torch.Tensor, torch.Tensor], object]
# `(batch, num_kv_heads, head_dim)` and type, of keys or of values.
_Form = tuple[tuple[int, int, int], torch.dtype]


def packed_shape(shape: KVShape, codec: KVCodec) -> KVShape:
    """Return the shape of the packed blocks of these states, seen as states themselves."""
    return shape._replace(
        key_dim=codec.keys.packed_bytes(shape.key_dim),
        value_dim=codec.values.packed_bytes(shape.value_dim),
        key_dtype=torch.uint8,
        value_dtype=torch.uint8,
    )


class QuantizedStore(LocalStore):
    """
    Keys and values of one layer, in full precision at both ends and as packed blocks between them.

    A block is quantized once, when 64 tokens have come after it. If tokens are removed up to the middle of a quantized
    block, the rest of the block is dequantized, and in full precision again.

    Until the codec is chosen, states to be quantized are pending: they wait in full precision for the queries that
    attend to them, or for another use of the store.

    Args:
        shape: of the states.
        choice: the codec, given or still to be chosen.
        full: store for the tokens in full precision, the last ones after the first ones.
        make_packed: makes the store for packed blocks of some shape, an entry for each block.
        scratch: memory in which all states are put together for attention on the device.
        layout: layout of the empty store.
    """

    def __init__(
        self,
        shape: KVShape,
        choice: CodecChoice,
        full: BufferedStore,
        make_packed: Callable[[KVShape], BufferedStore],
        scratch: Scratch,
        layout: Layout,
    ):
        super().__init__(shape)
        self.full = full
        self._make_packed = make_packed
        self.packed = make_packed(packed_shape(shape, choice.codec))
        self._choice = choice
        self._scratch = scratch
        self._own = layout.shard
        self.layout = layout if choice.is_made else replace(layout, shard=Shard.ALL)
        self._pending: tuple[Pair, ...] = ()

    def __deepcopy__(self, memo: dict) -> "QuantizedStore":
        self.wait_for_copies()
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._choice = copy.deepcopy(self._choice, memo)
        twin._make_packed = copy.deepcopy(self._make_packed, memo)
        twin.full, twin.packed = copy.deepcopy(self.full, memo), copy.deepcopy(self.packed, memo)
        twin._scratch = copy.deepcopy(self._scratch, memo)
        return twin

    @property
    def codec(self) -> KVCodec:
        """The codec of the blocks."""
        return self._choice.codec

    @property
    def is_intact(self) -> bool:
        parts = self.full.is_intact and self.packed.is_intact
        quantized = self.packed.num_tokens == self.layout.own_quantized_blocks
        whole = self.full.num_tokens + self.packed.num_tokens * GRANULE + self._pending_tokens == self.num_tokens
        return super().is_intact and parts and quantized and whole

    @property
    def sink_tokens(self) -> int:
        """Number of first tokens of this store that stay in full precision, in whole blocks of 64."""
        return self.layout.own_sink_tokens

    @property
    def held_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pending)

    @property
    def wants_queries(self) -> bool:
        return not self._choice.is_made

    @property
    def streamed(self) -> StreamedStore | None:
        return self.packed.streamed

    def observe(self, query: torch.Tensor) -> None:
        batch, heads, _, key_dim = query.shape if query.dim() == 4 else (0, 0, 0, 0)
        fits = (batch, key_dim) == (self.shape.batch, self.shape.key_dim) and heads % self.shape.num_kv_heads == 0
        if self.wants_queries and fits and query.shape[2]:
            self._choice.observe(query, self.shape.num_kv_heads)
        self.take_pending()

    def take_pending(self) -> None:
        if not self._pending:
            return
        keys, values = self._pending_states()
        version = self.version
        with self._changing():
            self.num_tokens -= self._pending_tokens
            self._pending = ()
        self._store(self._quantize_due(keys, values), self.packed.extend)
        self.version = version  # handles still stand for the same tokens

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new states and return all, dequantized; return the new ones as they are if there are no others."""
        self.take_pending()
        only_these = self.num_tokens == 0
        if only_these and not self._choice.is_made and self._blocks_to_quantize(keys.shape[2]):
            self._hold(keys, values)
            return keys, values
        change = self._quantize_due(keys, values)
        # Memory that may be refused is taken before anything changes.
        states = None if only_these else self._scratch.lend_states(self.shape, self.num_tokens + keys.shape[2])
        packed = self._store(change, self.packed.append)
        return (keys, values) if states is None else self._put_together(packed, states)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._extend(keys, values, self.packed.extend)

    def stage(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._extend(keys, values, self.packed.stage)

    def staged_range(self) -> tuple[int, int]:
        self.take_pending()
        start, end = self.packed.staged_range()
        return self.sink_tokens + start * GRANULE, self.sink_tokens + end * GRANULE

    def read_staged(self) -> Pair:
        start, end = self.staged_range()
        states = self._scratch.lend_states(self.shape, end - start)
        for codec, quantized, target in zip(self._codecs, self.packed.read_staged(), states, strict=True):
            codec.decode(quantized, target)
        return states

    def parts(self) -> tuple[Pair, Pair]:
        """Return states in full precision and packed blocks on the compute device; computation waits for copies."""
        self.take_pending()
        return self.full.read(), self.packed.read()

    def _extend(self, keys: torch.Tensor, values: torch.Tensor, add_packed: _AddPacked) -> None:
        self._scratch.release()
        is_due = self._layout_with(keys.shape[2]) is not self.layout
        if is_due and not self._choice.is_made:
            self._hold(keys, values)
            return
        if is_due or self.packed.streamed is not None:
            self._store(self._quantize_due(keys, values), add_packed)
            return
        num_full = self.full.num_tokens  # a decode step: few operations
        try:
            self.full.extend(keys, values)
        except BaseException:
            self.full.truncate(num_full)
            raise
        self._set_length(self.num_tokens + keys.shape[2])

    def read(self) -> Pair:
        self.take_pending()  # a shard has fewer tokens afterwards
        return self.read_into(self._scratch.lend_states(self.shape, self.num_tokens))

    def read_copy(self) -> Pair:
        self.take_pending()
        return self.read_into(Scratch(self.shape.device).lend_states(self.shape, self.num_tokens))

    def read_into(self, states: Pair) -> Pair:
        """Write all states to `states`, `[batch, num_kv_heads, num_tokens, head_dim]` on the compute device."""
        self.take_pending()
        return self._put_together(self.packed.read(), states)

    def read_from(self, start: int) -> Pair:
        self.wait_for_copies()
        keys, values = self.full.read_range(start - self.packed.num_tokens * GRANULE, self.full.num_tokens)
        return keys.clone(), values.clone()

    def pieces(self, size: int, cut: int) -> Iterator[tuple[int, Pair]]:
        """Yield all states, dequantized, about `size` tokens at a time, with the first token of each piece."""
        first = min(self.num_tokens, self.sink_tokens)
        last = first + self.packed.num_tokens * GRANULE
        if first:
            yield 0, self.full.read_range(0, first)
        for start, end in ranges(first, last, size, cut):
            yield start, self._dequantized((start - first) // GRANULE, (end - first) // GRANULE)
        if last < self.num_tokens:
            yield last, self.full.read_range(first, self.full.num_tokens)

    def whole_parts(self) -> dict[str, WholePart]:
        self.take_pending()
        return {"full": WholePart.own(self.full), "packed": WholePart.own(self.packed)}

    def take_parts(self, parts: Mapping[str, BufferedStore]) -> None:
        self._fit_packed()
        self.full.take_parts({"states": parts["full"]})
        self.packed.take_parts({"states": parts["packed"]})
        self.layout = replace(self.layout, quantized_blocks=self.packed.num_tokens)
        self._set_length(self.full.num_tokens + self.packed.num_tokens * GRANULE)

    def buffers(self) -> Iterable[TokenBuffer]:
        self.take_pending()
        return *self.full.buffers(), *self.packed.buffers()

    def planned_bytes(self, lengths: Sequence[int]) -> Iterable[tuple[torch.device, int]]:
        yield from self.full.planned_bytes([self.layout.most_full_tokens])
        yield from self.packed.planned_bytes([each.own_quantized_blocks for each in self.layout.growing(lengths)])

    def truncate(self, num_tokens: int) -> None:
        self.take_pending()
        self._truncate(num_tokens, self.layout.cropped(num_tokens))

    def _truncate(self, num_tokens: int, layout: Layout) -> None:
        first, kept = min(num_tokens, self.sink_tokens), layout.own_quantized_blocks
        if kept == self.packed.num_tokens:
            self.full.truncate(num_tokens - kept * GRANULE)
        else:
            self.wait_for_copies()
            rest = [states[:, :, : num_tokens - first - kept * GRANULE] for states in self._dequantized(kept, kept + 1)]
            with self._changing():
                self.full.truncate(first)
                self.full.extend(*rest)
                self.packed.truncate(kept)
        self.layout = layout
        self._set_length(num_tokens)

    def select_batch(self, indices: torch.Tensor) -> None:
        self.take_pending()
        with self._changing():
            self.full.select_batch(indices)
            self.packed.select_batch(indices)
            self.shape = self.shape._replace(batch=len(indices))
            self.version += 1

    def wait_for_copies(self) -> None:
        self.take_pending()
        self.full.wait_for_copies()
        self.packed.wait_for_copies()

    def wait_until_stored(self) -> None:
        self.take_pending()
        self.full.wait_until_stored()
        self.packed.wait_until_stored()

    def close(self) -> None:
        super().close()
        self._pending = ()
        self.full.close()
        self.packed.close()
        self._scratch.release()

    def _layout_with(self, new_tokens: int) -> Layout:
        """Return the layout with so many new tokens; pending tokens count."""
        return self.layout.after(self.num_tokens + new_tokens)

    def _blocks_to_quantize(self, new_tokens: int) -> int:
        return self._layout_with(new_tokens).own_quantized_blocks - self.packed.num_tokens

    @property
    def _pending_tokens(self) -> int:
        return sum(keys.shape[2] for keys, _ in self._pending)

    def _pending_states(self) -> Pair:
        keys, values = (
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*self._pending, strict=True)
        )
        return keys, values

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep new states in full precision until the codec is chosen; all checks come first."""
        tokens = keys.shape[2]
        count = self._blocks_to_quantize(tokens)
        self.full.reserve(self.layout.most_full_tokens)
        self.packed.reserve(self.packed.num_tokens + count)
        self._require_finite(keys, values, count)
        with self._changing():
            self._pending = (*self._pending, (keys, values))
            self._set_length(self.num_tokens + tokens)

    def _require_finite(self, keys: torch.Tensor, values: torch.Tensor, num_blocks: int) -> None:
        for states in (keys, values):
            # A sum is quick, but may be infinite although all numbers are finite.
            if not torch.isfinite(states.sum()) and not torch.isfinite(states).all():
                raise self._not_finite(num_blocks, "infinite, or not a number")

    def _choose(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Choose the codec by all states from the first block to quantize on, new ones included."""
        self._require_finite(keys, values, self._blocks_to_quantize(keys.shape[2]))
        sequences = self._sequences(keys, values)
        blocks = len(sequences[0]) // GRANULE
        picked = sorted({index * blocks // _SAMPLED_BLOCKS for index in range(_SAMPLED_BLOCKS)})
        sampled = [
            torch.cat([sequence[index * GRANULE : (index + 1) * GRANULE] for index in picked], dim=2)
            for sequence in sequences
        ]
        self._choice.make(*sampled)
        self._fit_packed()

    def _sequences(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[JoinedStates, JoinedStates]:
        """Return the states in full precision after the sink tokens, followed by new states."""
        first, num_full = self.sink_tokens, self.full.num_tokens
        olds = self.full.read_range(min(first, num_full), num_full)
        pairs = zip(olds, (keys, values), strict=True)
        of_keys, of_values = (
            JoinedStates(old.to(new.device), new[:, :, max(0, first - num_full) :]) for old, new in pairs
        )
        return of_keys, of_values

    def _fit_packed(self) -> None:
        """Replace the empty store for packed blocks by one for the chosen codec, if their sizes differ."""
        shape = packed_shape(self.shape, self.codec)
        if shape != self.packed.shape:
            self.packed.close()
            self.packed = self._make_packed(shape)

    def _not_finite(self, num_blocks: int, reason: str) -> ValueError:
        count = num_blocks * GRANULE
        end = self.sink_tokens + self.packed.num_tokens * GRANULE + count
        return ValueError(
            f"Some of the keys or values of the {count:,} tokens before token {end:,} are {reason}: no codes "
            "stand for such. Nothing was stored. Find out why the model computes them, or use a cache of full "
            "precision, such as DynamicHybridCache."
        )

    def _quantize_due(self, keys: torch.Tensor, values: torch.Tensor) -> "_Change":
        """
        Quantize the blocks that are due with these new tokens, on their device, and return the change to store.

        Nothing is stored yet; memory is reserved.
        """
        first, num_full = self.sink_tokens, self.full.num_tokens
        layout = self._layout_with(keys.shape[2])
        count = (layout.own_quantized_blocks - self.packed.num_tokens) * GRANULE
        self.full.wait_for_copies()
        self.full.reserve(layout.most_full_tokens)
        if not count:
            # 63 of 64 steps quantize nothing, and a call of the codec would wait for the device.
            shapes = self.packed.shape.keys, self.packed.shape.values
            nothing = [keys.new_empty((*heads, 0, size), dtype=torch.uint8) for *heads, size in shapes]
            return _Change((nothing[0], nothing[1]), num_full, (keys, values), keys.shape[2], layout)
        if not self._choice.is_made:
            self._choose(keys, values)
        # The first tokens are followed by those in full precision so far, and then by the new ones.
        kept, missing = min(first, num_full), max(0, first - num_full)
        packed, full = [], []
        sequences, news = self._sequences(keys, values), (keys, values)
        for codec, sequence, new in zip(self._codecs, sequences, news, strict=True):
            starts = range(0, count, _QUANTIZED_AT_ONCE)
            try:
                pieces = [codec.encode(sequence[start : min(start + _QUANTIZED_AT_ONCE, count)]) for start in starts]
            except ValueError as error:
                raise self._not_finite(count // GRANULE, str(error)) from None
            packed.append(torch.cat(pieces, dim=2))
            # A copy, because storing it overwrites its source.
            full.append(torch.cat([new[:, :, :missing], sequence[count:]], dim=2))
        return _Change((packed[0], packed[1]), kept, (full[0], full[1]), keys.shape[2], layout)

    def _store(self, change: "_Change", add_packed: Callable[[torch.Tensor, torch.Tensor], Added]) -> Added:
        """Add the packed blocks by `add_packed`, then replace the states in full precision."""
        quantized = self.packed.num_tokens
        try:
            added = add_packed(*change.packed)
        except BaseException:
            self.packed.truncate(quantized)  # their tokens are in full precision still
            raise
        with self._changing():
            self.full.truncate(change.kept)
            self.full.extend(*change.full)
            self.layout = change.layout
            self._set_length(self.num_tokens + change.new_tokens)
        return added

    def _put_together(self, packed: Pair, states: Pair) -> Pair:
        """Write all states into lent memory."""
        first = min(self.num_tokens, self.sink_tokens)
        last = first + self.packed.num_tokens * GRANULE
        for codec, full, quantized, target in zip(self._codecs, self.full.read(), packed, states, strict=True):
            target[:, :, :first] = full[:, :, :first]
            codec.decode(quantized, target[:, :, first:last])
            target[:, :, last:] = full[:, :, first:]
        return states

    def block_keys(self, first: int, last: int) -> torch.Tensor:
        """Return dequantized keys of some quantized blocks, by number; call `wait_for_copies` first."""
        sinks = self.sink_tokens // GRANULE
        return self._decode(self.codec.keys, self._forms[0], self.packed.keys.read_range(first - sinks, last - sinks))

    def _dequantized(self, first: int, last: int) -> Pair:
        """Dequantize the tokens of some blocks, on the device of the packed blocks."""
        packed = self.packed.read_range(first, last)
        keys, values = map(self._decode, self._codecs, self._forms, packed)
        return keys, values

    @staticmethod
    def _decode(codec: Codec, form: "_Form", packed: torch.Tensor) -> torch.Tensor:
        (batch, heads, head_dim), dtype = form
        tokens = packed.shape[2] * GRANULE
        states = torch.empty(batch, heads, tokens, head_dim, dtype=dtype, device=packed.device)
        codec.decode(packed, states)
        return states

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.codec.keys, self.codec.values

    @property
    def _forms(self) -> "tuple[_Form, _Form]":
        return (self.shape.keys, self.shape.key_dtype), (self.shape.values, self.shape.value_dtype)


class _Change(NamedTuple):
    """
    A change to store: new packed blocks, and states in full precision.

    Attributes:
        packed: new packed blocks of keys and values.
        kept: tokens in full precision that stay.
        full: keys and values in full precision that follow these.
        new_tokens: number of new tokens.
        layout: layout with the new tokens.
    """

    packed: Pair
    kept: int
    full: Pair
    new_tokens: int
    layout: Layout
