"""The stores of a cache's layers, and the memory and counters that they share."""

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..attention import StoredAttention, has_quantized_kernel
from ..codecs import is_foldable
from ..processes import Peers
from ..storage import (
    GRANULE,
    Allowance,
    AnyStore,
    CacheStats,
    CodecChoice,
    CpuFraction,
    HostBlocks,
    HostBudget,
    InitialCapacity,
    KVCodec,
    KVShape,
    Layout,
    OneSequence,
    Resident,
    Run,
    Scratch,
    SeenQueries,
    Shard,
    ShardedStore,
    Split,
    SplitStore,
    Staging,
    Store,
    Streamed,
    WindowStore,
    can_page_lock,
    grown_capacity,
    streams_for,
)
from .options import Placement

# Most bytes that layers, beside the one in use, may hold until they see queries.
MOST_HELD_BYTES = 2**29
# Fewer tokens are copied instead of shared: another segment would cost each step more.
_LEAST_SHARED_TOKENS = 2 * GRANULE
# Blocks with which a codec is chosen: it takes as long as 80 tokens of a prompt, and fewer blocks tell less of others.
_CHOOSING_BLOCKS = 8
# Tokens in full precision that a quantized layer keeps, but for a chunk on its way.
_MOST_RECENT = (_CHOOSING_BLOCKS + 2) * GRANULE

_Kind = type[Resident] | type[HostBlocks]


class Kinds(NamedTuple):
    """
    The kinds of runs of a layer. A new placement is a kind of run, a row here, and the contract of tests.

    Attributes:
        growing: of all tokens, or of the packed blocks of a quantized layer.
        few: of tokens in full precision that are few: recent ones of a quantized layer, or those that follow a prefix.
    """

    growing: _Kind
    few: _Kind


DEVICE = Kinds(Resident, Resident)
HOST = Kinds(HostBlocks, HostBlocks)
STREAMED = Kinds(Streamed, Resident)
# The CPU attends to a layer of a model on an accelerator, or to a part of it.
STREAMED_OR_ATTENDED = Kinds(Streamed, Streamed)


class LayerStores:
    """
    Makes the stores of a cache's layers, and holds the budgets, counters and device memory that they share.

    Args:
        placement: where the layers live.
        capacity: capacity of buffers before the first token.
        layers: indices in the model of the full-attention layers.
        windows: indices of layers that keep the last tokens only.
        codecs: how layers are quantized, by index; the others stay in full precision.
        config: config of the model, or of its text part; it names the implementation of attention in use.
        peers: processes that keep a shard each; `None` for a single process.

    Attributes:
        first_layer: index of the first layer that asks for a store, to which a forward pass comes first.
        unfinished: the operation on all layers that ended half-way.
        thread: that began the last forward pass.
        checkpoints: of the cache, by the lengths that it can go back to.
        last_read: the store that a caller has read last, its version then, and a copy of its states.
        num_edits: how often states were set, or became others of another type or place.
        implementation: the model's implementation of attention in the last forward pass.
        needs_states: whether that is neither "sdpa", which handles answer, nor "eager": then it needs
            the states.
    """

    def __init__(
        self,
        placement: Placement,
        capacity: InitialCapacity,
        layers: Collection[int],
        windows: Collection[int] = (),
        codecs: Mapping[int, KVCodec] | None = None,
        config: PreTrainedConfig | None = None,
        peers: Peers | None = None,
    ):
        self.placement = placement
        self.config = config
        self.first_layer = min([*layers, *windows], default=0)
        self._compared_layer = min(layers, default=0)
        self.peers = peers
        self.shard = Shard.ALL if peers is None else Shard(peers.rank, peers.size)
        self.capacity = capacity
        allowance = Allowance(len(codecs or {}))
        self._choices = {index: CodecChoice(codec, allowance) for index, codec in (codecs or {}).items()}
        expected = self.shard.tokens(capacity.device_tokens)
        self.budget = HostBudget(len(layers) - len(self._choices), expected_tokens=expected)
        self.recent_budget = _RecentBudget(len(self._choices))
        self.packed_budget = HostBudget(len(self._choices), GRANULE, expected)
        self.device_budget = HostBudget(len(layers), expected_tokens=expected)
        self.window_budget = HostBudget(len(windows))
        self.stats = CacheStats()
        fraction = placement.cpu_fraction
        self.cpu_fraction = None if fraction is None else CpuFraction(fraction, placement.adapts, self.stats)
        self.attention = StoredAttention(self.stats, placement.cpu_decode not in (None, False))
        self.stagings: dict[torch.device, Staging] = {}
        self.scratches: dict[torch.device, Scratch] = {}
        self.unfinished: str | None = None
        self.needs_states = False
        self.implementation: str | None = None
        # Stores whose tokens may wait for a codec, in the order of their last use.
        self._waiting: list[weakref.ref[AnyStore]] = []
        self.last_read: tuple[Any, ...] = (None,)
        self.num_edits = 0
        self.thread: int | None = None
        self.checkpoints: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, of whose layers nothing was read, and which note when they wait."""
        return {**vars(self), "last_read": (None,), "_waiting": []}

    @property
    def codecs(self) -> dict[int, KVCodec]:
        """The codecs of quantized layers, by index in the model, as far as they are chosen by now."""
        return {index: choice.codec for index, choice in self._choices.items()}

    def take_codecs(self, codecs: Mapping[int, KVCodec]) -> None:
        """Let quantized layers, which are empty, have codecs that were chosen before."""
        for index, codec in codecs.items():
            self._choices[index].take(codec)

    @property
    def seen_queries(self) -> dict[int, SeenQueries]:
        """The queries that layers have seen whose codec is still to be chosen, by index in the model."""
        choices = {index: choice for index, choice in self._choices.items() if not choice.is_made}
        return {index: each.seen_queries for index, each in choices.items() if each.seen_queries is not None}

    def take_seen_queries(self, seen: Mapping[int, SeenQueries]) -> None:
        """Let codecs be chosen by these queries and those that come, as if no others had been."""
        for index, choice in self._choices.items():
            choice.seen_queries = seen.get(index)

    @property
    def asked_codecs(self) -> dict[int, KVCodec]:
        """The codecs of quantized layers as they were asked for, whatever is chosen by now."""
        return {index: choice.asked_for for index, choice in self._choices.items()}

    def drop_checkpoints(self, after: int = 0) -> None:
        """Drop the checkpoints of longer lengths, because a layer is about to hold other tokens from there on."""
        for length in tuple(self.checkpoints):
            if length > after:
                self.checkpoints.pop(length, None)

    def place_of(self, layer_idx: int, shape: KVShape) -> "Place":
        """
        Return the place of the full-attention layer `layer_idx`.

        Raises:
            ValueError: the CPU was to attend to the layer, and there is no kernel for its states.
        """
        on_cpu = self._attends_on_cpu(layer_idx, shape)
        choice, computes_on_cpu, fraction = self._choices.get(layer_idx), shape.device.type == "cpu", self.cpu_fraction
        if fraction is not None and (not on_cpu or (fraction.adapts and computes_on_cpu)):
            fraction = None  # all is best if the model is on the CPU, too
        if on_cpu:
            stays_on_host = (computes_on_cpu or self.peers is not None) and fraction is None
            kinds, on_codes = HOST if stays_on_host else STREAMED_OR_ATTENDED, False
        else:
            kinds = STREAMED if self.placement.offload else DEVICE
            on_codes = choice is not None and self.peers is None and has_quantized_kernel(choice.codec, shape)
        device_tokens = self.placement.device_tokens if on_cpu or kinds is STREAMED else 0
        is_compared = layer_idx == self._compared_layer
        return Place(self, choice, kinds, on_cpu, on_codes, is_compared, device_tokens, fraction)

    def place_of_window(self, window: int, shape: KVShape) -> "Place":
        """Return the place of a layer that keeps the last tokens only, where the model computes."""
        is_on_cpu = shape.device.type == "cpu" and shape.element is not None and not self.attention.is_declined
        on_cpu = is_on_cpu and self.placement.attends_on_cpu(computes_on_cpu=True)
        return WindowPlace(self, None, HOST if on_cpu else DEVICE, on_cpu, False, False, 0, None, window)

    def _attends_on_cpu(self, layer_idx: int, shape: KVShape) -> bool:
        if self.attention.is_declined or not self.placement.attends_on_cpu(shape.device.type == "cpu"):
            return False
        is_asked_for = self.placement.cpu_decode is not None
        if shape.element is None and is_asked_for:
            raise ValueError(
                f"cpu_decode needs keys and values of one type, float32, float16 or bfloat16; layer {layer_idx} has "
                f"{shape.key_dtype} and {shape.value_dtype}. Load the model in one of these, or pass cpu_decode=False."
            )
        choice = self._choices.get(layer_idx)
        has_kernel = choice is None or is_foldable(choice.codec)
        if choice is not None and not has_kernel and is_asked_for:
            raise ValueError(
                f"There is no kernel that attends to {choice.codec}. Use the codec minmax, or pass cpu_decode=False."
            )
        return shape.element is not None and has_kernel

    def note_pass(self, layer_idx: int) -> None:
        """
        Note the thread of a forward pass, which begins with the first layer, and its implementation of attention.

        Raises:
            RuntimeError: another thread has begun a forward pass before this one's ended.
        """
        thread = get_ident()
        if layer_idx == self.first_layer:
            self.thread, self.last_read = thread, (None,)
            # Asked once a pass, because transformers' configs take long to answer.
            self.implementation = getattr(self.config, "_attn_implementation", None)
            self.needs_states = self.implementation not in (None, "sdpa", "eager")
        elif self.thread not in (thread, None):
            raise RuntimeError(
                "Two threads run a model with the same cache at the same time, and their tokens are mixed up in it. "
                "Give each its own cache, or copy.deepcopy(cache) for a prefix that they share, and reset() this one."
            )

    def note_waiting(self, store: AnyStore) -> None:
        """
        Note that tokens of a store may wait for its codec, and settle those that have waited longest.

        If attention cannot be observed, all layers would otherwise hold all of their states in full precision.
        """
        alive = (reference() for reference in self._waiting)
        waiting = [each for each in alive if each is not None and each is not store and each.waits]
        while waiting and sum(each.waiting_bytes for each in waiting) > MOST_HELD_BYTES:
            waiting.pop(0).settle()
        self._waiting = [weakref.ref(each) for each in (*waiting, store)]


@dataclass(frozen=True)
class Place:
    """
    The place of a layer's tokens, and what attends to them there. It makes the stores of the layer, and their runs.

    Attributes:
        stores: what it shares with the other layers.
        choice: its codec; `None` for full precision.
        kinds: of its runs.
        on_cpu: whether the CPU attends to it when few tokens come at once.
        on_codes: whether few queries attend to its packed blocks on their device without dequantizing them.
        is_compared: whether processes that share it compare its new keys.
        device_tokens: most tokens that are on the device, while the others are in host memory.
        cpu_fraction: of the tokens in host memory that the CPU attends to; `None` for all or none.
    """

    stores: LayerStores
    choice: CodecChoice | None
    kinds: Kinds
    on_cpu: bool
    on_codes: bool
    is_compared: bool
    device_tokens: int
    cpu_fraction: CpuFraction | None

    def make(self, shape: KVShape, after_prefix: bool = False) -> OneSequence:
        """
        Make an empty store of the layer.

        Args:
            shape: of the states.
            after_prefix: for tokens that follow a prefix, which has the sinks.

        Raises:
            ValueError: its codec was chosen for other heads.
        """
        stores, choice, device_tokens, runs = self.stores, self.choice, self.device_tokens, self
        if choice is not None:
            choice.codec.keys.require_fit(shape.num_kv_heads, shape.key_dim)
            choice.codec.values.require_fit(shape.num_kv_heads, shape.value_dim)
        split = Split(device_tokens, GRANULE if choice is None else choice.codec.sink_tokens)
        if after_prefix:
            split = Split(device_tokens - split.first_tokens, sink_tokens=0)
            if choice is None:
                runs = replace(self, kinds=Kinds(self.kinds.few, self.kinds.few))
        layout = Layout(split.sink_tokens, choice is not None, split.first_tokens, stores.shard)
        if not device_tokens and not after_prefix:
            layout = replace(layout, choosing_blocks=_CHOOSING_BLOCKS)
        scratch = stores.scratches.setdefault(shape.device, Scratch(shape.device))
        if stores.peers is not None:
            return ShardedStore(shape, layout, runs, scratch, choice, stores.peers, self.is_compared)
        store = Store(shape, layout, runs, scratch, choice)
        if not device_tokens:
            return store
        capacity = InitialCapacity(min(stores.capacity.device_tokens, device_tokens), device_tokens)
        ends = Resident(shape, capacity, stores.device_budget)
        return SplitStore(store, ends, split, scratch, self.cpu_fraction, stores.stats)

    def can_be_continued(self, store: OneSequence, num_shareable: int) -> bool:
        """
        Return whether several sequences can share the first tokens of `store`, and it saves enough.

        On a device they can share tokens in full precision that are in one place, streamed or resident.
        """
        stores = self.stores
        is_shared_out = stores.peers is not None or stores.cpu_fraction is not None
        has_one_place = self.on_cpu or (isinstance(store, Store) and store.packed is None)
        if not has_one_place or is_shared_out or stores.needs_states or stores.attention.is_declined:
            return False
        return num_shareable >= max(_LEAST_SHARED_TOKENS, store.layout.sink_tokens)

    def dense(self, shape: KVShape, layout: Layout) -> Run:
        """Make an empty run of tokens in full precision, see `Runs`."""
        stores = self.stores
        if not layout.is_quantized:
            return self._run(self.kinds.growing, shape, stores.capacity, stores.budget)
        most = layout.most_full_tokens
        # Host memory is asked for a chunk ahead, and page-locked with it.
        capacity = InitialCapacity(most, grown_capacity(most))
        return self._run(self.kinds.few, shape, capacity, stores.recent_budget)

    def packed(self, shape: KVShape) -> Run:
        """Make an empty run of packed blocks, see `Runs`."""
        stores = self.stores
        return self._run(self.kinds.growing, shape, stores.capacity.of_packed(), stores.packed_budget, packed=True)

    def _run(
        self, kind: _Kind, shape: KVShape, capacity: InitialCapacity, budget: HostBudget, packed: bool = False
    ) -> Run:
        if kind is not Streamed:
            return kind(shape, capacity, budget, packed)
        stores, device, placement = self.stores, shape.device, self.stores.placement
        if device not in stores.stagings:
            stores.stagings[device] = Staging(streams_for(device), placement.prefetch_layers, stores.stats)
        pinned = placement.pin_memory and can_page_lock(device.type)
        return Streamed(shape, capacity, budget, stores.stagings[device], pinned, packed)


@dataclass(frozen=True)
class WindowPlace(Place):
    """The place of a layer that keeps the last tokens only: `window` of them, and up to a block or an eighth more."""

    window: int

    def make(self, shape: KVShape, after_prefix: bool = False) -> WindowStore:
        scratch = self.stores.scratches.setdefault(shape.device, Scratch(shape.device))
        return WindowStore(shape, self.window, self, scratch)

    def dense(self, shape: KVShape, layout: Layout) -> Run:
        most = WindowStore.most_tokens(self.window)
        return self._run(self.kinds.growing, shape, InitialCapacity(0, grown_capacity(most)), self.stores.window_budget)


class _RecentBudget(HostBudget):
    """A budget that is asked once, for recent tokens: a chunk is small beside a model's activations."""

    def grow(self, store: object, num_tokens: int, bytes_per_token: int, moved_bytes: int = 0) -> int:
        if not self._held:
            super().grow(store, min(num_tokens, _MOST_RECENT), bytes_per_token, moved_bytes)
        self.note(store, num_tokens, bytes_per_token)
        return num_tokens
