"""The stores of a cache's layers, and the memory and counters that they share."""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ..attention import KeyIndex, LayerSelection, StoredAttention, has_quantized_kernel
from ..processes import Peers
from ..storage import (
    GRANULE,
    Allowance,
    CacheStats,
    CodecChoice,
    CpuFraction,
    ExpectedLength,
    HostBlocks,
    HostBudget,
    InitialCapacity,
    KVCodec,
    KVShape,
    Layout,
    QuantizedSegment,
    Resident,
    Run,
    Scratch,
    SeenQueries,
    Shard,
    ShardedStore,
    Staging,
    Store,
    Streamed,
    can_page_lock,
    grown_capacity,
    streams_for,
)
from .lent_states import RecentlyLent
from .placement import Placement
from .selection import Selection

# Most bytes that layers, beside the one in use, may hold for callers, or until they see queries.
MOST_HELD_BYTES = 2**29
# Fewer tokens are copied instead of shared: another segment would cost each step more.
_LEAST_SHARED_TOKENS = 2 * GRANULE
# By whether a layer is quantized: the attention mass that loses nothing (`experiments.selection.selection`), and the
# fraction of indexed tokens beyond which reading all is as fast (`experiments.selection.selection_speed`).
_TOP_P, _MOST_READ = {False: 0.995, True: 0.998}, {False: 1 / 4, True: 1 / 8}


class LayerStores:
    """
    Makes the stores of a cache's layers, and holds the budgets, counters and device memory that they share.

    Args:
        placement: where the layers live.
        capacity: capacity of buffers before the first token.
        num_layers: how many layers will ask for a store.
        codecs: how layers are quantized, by index in the model; the others stay in full precision.
        config: config of the model, or of its text part; it names the implementation of attention in use.
        peers: processes that keep a shard each; `None` for a single process.
        selection: lets attention skip pages; `None` to read all.

    Raises:
        ValueError: `placement` asks for more resident layers than there are.

    Attributes:
        unfinished: the operation on all layers that ended half-way.
        recently_lent: layers that callers have read from.
        sees_as_alone: whether each token of a quantized prompt sees the codes that it would see had the tokens come one
            by one, so that its bits do not depend on where chunks end (`attention/later_chunks.py`).
        implementation: the model's implementation of attention in the last forward pass.
        needs_states: whether that is neither "sdpa", which handles answer, nor "eager": then it needs
            the states.
    """

    def __init__(
        self,
        placement: Placement,
        capacity: InitialCapacity,
        num_layers: int,
        codecs: Mapping[int, KVCodec] | None = None,
        config: PreTrainedConfig | None = None,
        peers: Peers | None = None,
        selection: Selection | None = None,
    ):
        self.placement = placement
        self.config = config
        self.peers = peers
        self.selection = selection
        self._shard = Shard.ALL if peers is None else Shard(peers.rank, peers.size)
        self.capacity = capacity
        allowance = Allowance(len(codecs or {}))
        self._choices = {index: CodecChoice(codec, allowance) for index, codec in (codecs or {}).items()}
        expected_length = ExpectedLength(self._shard.tokens(capacity.device_tokens))
        self.budget = HostBudget(num_layers - len(self._choices), expected_length=expected_length)
        self.ends_budget = HostBudget(len(self._choices))
        self.packed_budget = HostBudget(len(self._choices), GRANULE, expected_length)
        reading_all = () if selection is None else selection.dense_layers
        self.device_budget = HostBudget(num_layers, expected_length=expected_length)
        self._index_budget = HostBudget(num_layers - len(reading_all), GRANULE, expected_length)
        self.stats = CacheStats()
        fraction = placement.cpu_fraction
        self.cpu_fraction = None if fraction is None else CpuFraction(fraction, placement.adapts, self.stats)
        self.attention = StoredAttention(self.stats, placement.cpu_decode not in (None, False), self._shard)
        self.stagings: dict[torch.device, Staging] = {}
        self.scratches: dict[torch.device, Scratch] = {}
        self.unfinished: str | None = None
        self.sees_as_alone = False
        self.needs_states = False
        self.implementation: str | None = None
        self._holding = _Holding()
        self.recently_lent = RecentlyLent(MOST_HELD_BYTES)
        self._resident = placement.resident_ordinals(num_layers)
        self._thread: int | None = None

    @property
    def num_processes(self) -> int:
        """Number of processes that keep a shard each."""
        return 1 if self.peers is None else self.peers.size

    @property
    def codecs(self) -> dict[int, KVCodec]:
        """The codecs of quantized layers, by index in the model, as far as they are chosen by now."""
        return {index: choice.codec for index, choice in self._choices.items()}

    @property
    def most_sink_tokens(self) -> int | None:
        """The most tokens that a quantized layer never quantizes; `None` if no layer is quantized."""
        return max((choice.asked_for.sink_tokens for choice in self._choices.values()), default=None)

    def take_codecs(self, codecs: Mapping[int, KVCodec]) -> None:
        """Let quantized layers, which are empty, have codecs that were chosen before."""
        for index, codec in codecs.items():
            self._choices[index].codec = codec

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

    def attends_on_cpu(self, layer_idx: int, ordinal: int, shape: KVShape) -> bool:
        """
        Return whether the CPU attends to a layer when few tokens come at once.

        Raises:
            ValueError: it was asked for, and there is no kernel for the stored states.
        """
        if self.attention.is_declined or not self.placement.attends_on_cpu(layer_idx, shape.device.type == "cpu"):
            return False
        if self.cpu_fraction is not None and ordinal in self._resident:
            return False
        is_asked_for = self.placement.cpu_decode is not None
        if shape.element is None and is_asked_for:
            raise ValueError(
                f"cpu_decode needs keys and values of one type, float32, float16 or bfloat16; layer {layer_idx} has "
                f"{shape.key_dtype} and {shape.value_dtype}. Load the model in one of these, or pass cpu_decode=False."
            )
        choice = self._choices.get(layer_idx)
        has_kernel = choice is None or self.attention.covers(choice.codec)
        if not has_kernel and is_asked_for:
            assert choice is not None
            raise ValueError(
                f"There is no kernel that attends to {choice.codec}. Use the codec minmax, or pass cpu_decode=False."
            )
        return shape.element is not None and has_kernel

    def attends_quantized(self, layer_idx: int, ordinal: int, shape: KVShape) -> bool:
        """Return whether few queries attend to a layer's quantized blocks on its device without dequantizing them."""
        choice = self._choices.get(layer_idx)
        if choice is None or self.peers is not None or self.attends_on_cpu(layer_idx, ordinal, shape):
            return False
        return has_quantized_kernel(choice.codec, shape)

    def selection_of(self, layer_idx: int) -> LayerSelection | None:
        """Return the selection by which attention of a layer skips pages; `None` if it reads all."""
        if self.selection is None:
            return None
        wanted, is_quantized = self.selection, self.is_quantized(layer_idx)
        top_p = _TOP_P[is_quantized] if wanted.top_p is None else wanted.top_p
        most = _MOST_READ[is_quantized] if wanted.most is None else wanted.most
        index = KeyIndex(self._index_budget, self.capacity.of_packed())
        return LayerSelection(layer_idx, 1.0 if layer_idx in wanted.dense_layers else top_p, most, index, self.stats)

    def is_quantized(self, layer_idx: int) -> bool:
        """Return whether a layer is quantized."""
        return layer_idx in self._choices

    def note_pass(self, ordinal: int) -> None:
        """
        Note the thread of a forward pass, which begins with the first layer, and its implementation of attention.

        Raises:
            RuntimeError: another thread has begun a forward pass before this one's ended.
        """
        thread = threading.get_ident()
        if ordinal == 0:
            self._thread = thread
            # Asked once a pass, because transformers' configs take long to answer.
            self.implementation = getattr(self.config, "_attn_implementation", None)
            self.needs_states = self.implementation not in (None, "sdpa", "eager")
        elif self._thread not in (thread, None):
            raise RuntimeError(
                "Two threads run a model with the same cache at the same time, and their tokens are mixed up in it. "
                "Give each its own cache, or copy.deepcopy(cache) for a prefix that they share, and reset() this one."
            )

    def make(self, layer_idx: int, ordinal: int, shape: KVShape, after_prefix: bool = False) -> Store:
        """
        Make the store of the layer `layer_idx`, which is the `ordinal`-th full-attention layer.

        Args:
            layer_idx: index in the model.
            ordinal: index among the full-attention layers.
            shape: of the states.
            after_prefix: for tokens that follow a prefix, which has the sinks.

        Raises:
            ValueError: its codec was chosen for other heads.
        """
        choice = self._choices.get(layer_idx)
        on_cpu = self.attends_on_cpu(layer_idx, ordinal, shape)
        if choice is not None:
            choice.codec.keys.require_fit(shape.num_kv_heads, shape.key_dim)
            choice.codec.values.require_fit(shape.num_kv_heads, shape.value_dim)
        sink_tokens = GRANULE if choice is None else choice.codec.sink_tokens
        device_tokens = self.placement.device_tokens if self._is_in_host_memory(ordinal, on_cpu) else 0
        layout = Layout(sink_tokens, choice is not None, device_tokens, self._shard)
        if after_prefix:
            layout = layout.after_prefix
        scratch = self.scratches.setdefault(shape.device, Scratch(shape.device))
        full = self._full_segment(ordinal, shape, on_cpu, layout, after_prefix)
        quantized = None if choice is None else QuantizedSegment(shape, choice, PackedSegments(self, ordinal, on_cpu))
        if self.peers is not None:
            return ShardedStore(shape, layout, full, scratch, quantized, self.peers, is_compared=ordinal == 0)
        if not device_tokens:
            return Store(shape, layout, full, scratch, quantized)
        capacity = InitialCapacity(min(self.capacity.device_tokens, device_tokens), device_tokens)
        on_device = Resident(shape, capacity, self.device_budget)
        cpu_fraction = self._cpu_fraction_for(shape) if on_cpu else None
        return Store(shape, layout, full, scratch, quantized, on_device, cpu_fraction, self.stats)

    def can_be_continued(self, store: Store, num_shareable: int, on_cpu: bool) -> bool:
        """
        Return whether several sequences can share the first tokens of `store`, and it saves enough.

        On a device they can share tokens in full precision that are in one place, streamed or resident.
        """
        has_one_place = on_cpu or store.has_one_segment
        is_shared_out = self.peers is not None or self.cpu_fraction is not None
        if not has_one_place or is_shared_out or self.needs_states or self.attention.is_declined:
            return False
        return num_shareable >= max(_LEAST_SHARED_TOKENS, store.layout.sink_tokens)

    def _is_in_host_memory(self, ordinal: int, on_cpu: bool) -> bool:
        return on_cpu or (self.placement.offload and ordinal not in self._resident)

    def _cpu_fraction_for(self, shape: KVShape) -> CpuFraction | None:
        """Return the CPU fraction; `None` for all, which is best if the model is on the CPU, too."""
        is_all = self.cpu_fraction is not None and self.cpu_fraction.adapts and shape.device.type == "cpu"
        return None if is_all else self.cpu_fraction

    def _full_segment(self, ordinal: int, shape: KVShape, on_cpu: bool, layout: Layout, after_prefix: bool) -> Run:
        """Make the segment of the tokens in full precision that are not kept on the device as ends of a layer."""
        if layout.is_quantized:
            most = layout.most_full_tokens
            # Host memory is asked for a chunk ahead, and page-locked with it.
            of_ends = InitialCapacity(most, grown_capacity(most)), self.ends_budget
            # Tokens in full precision are few: without attention on the CPU they stay on the device.
            return self._segment(ordinal, shape, on_cpu, *of_ends) if on_cpu else Resident(shape, *of_ends)
        if after_prefix and not on_cpu and not layout.device_tokens:
            # Tails are short beside the prefix, so they stay on the device that uses them.
            return Resident(shape, self.capacity, self.budget)
        return self._segment(ordinal, shape, on_cpu, self.capacity, self.budget)

    def make_packed(self, ordinal: int, shape: KVShape, on_cpu: bool) -> Run:
        """Make a segment for packed blocks of this shape."""
        return self._segment(ordinal, shape, on_cpu, self.capacity.of_packed(), self.packed_budget, packed=True)

    def note_holding(self, store: Store) -> None:
        """
        Note that a layer may hold pending states, and let those be stored that have waited longest.

        If attention cannot be observed, all layers would otherwise hold all of their states.
        """
        self._holding.note(store)

    def _segment(
        self,
        ordinal: int,
        shape: KVShape,
        on_cpu: bool,
        capacity: InitialCapacity,
        budget: HostBudget,
        packed: bool = False,
    ) -> Run:
        """Make a segment where the placement says."""
        stays_on_host = shape.device.type == "cpu" or self.peers is not None
        if on_cpu and stays_on_host and self._cpu_fraction_for(shape) is None:
            return HostBlocks(shape, capacity, budget, packed)
        if not on_cpu and not self.placement.offload:
            return Resident(shape, capacity, budget, packed)
        if shape.device not in self.stagings:
            streams = streams_for(shape.device)
            self.stagings[shape.device] = Staging(streams, self.placement.prefetch_layers, self.stats)
        pinned = self.placement.pin_memory is not False and can_page_lock(shape.device.type)
        resident = ordinal in self._resident and not on_cpu
        return Streamed(shape, capacity, budget, self.stagings[shape.device], resident, pinned, packed)


class _Holding:
    """Stores that may hold pending states, in the order of their last use; they stay no longer for it."""

    def __init__(self) -> None:
        self._stores: list[weakref.ref[Store]] = []

    def __deepcopy__(self, memo: dict) -> "_Holding":
        """Return an empty one: the stores of a copy are noted at their next use."""
        return _Holding()

    def note(self, store: Store) -> None:
        alive = (reference() for reference in self._stores)
        holding = [each for each in alive if each is not None and each is not store and each.pending_bytes]
        while holding and sum(each.pending_bytes for each in holding) > MOST_HELD_BYTES:
            holding.pop(0).settle()
        self._stores = [weakref.ref(each) for each in (*holding, store)]


@dataclass(frozen=True)
class PackedSegments:
    """Makes the segments for the packed blocks of one layer, whose sizes are known once its codec is chosen."""

    stores: LayerStores
    ordinal: int
    on_cpu: bool

    def __call__(self, shape: KVShape) -> Run:
        return self.stores.make_packed(self.ordinal, shape, self.on_cpu)
