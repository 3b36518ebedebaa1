"""One full-attention layer of a hybrid cache."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .cpu_attention import CpuAttention
from .handles import handles_of
from .observed_keys import observed
from .placement import Placement
from .storage import (
    GRANULE,
    Allowance,
    BufferedStore,
    CacheStats,
    CodecChoice,
    CodedStore,
    HostBudget,
    HostStore,
    KVCodec,
    KVShape,
    KVStore,
    Outlook,
    ResidentStore,
    Room,
    Scratch,
    Staging,
    StreamedStore,
    full_tokens,
    streams_for,
)

# Assisted decoding checks up to so many at once.
_FEW_TOKENS = 16
# That layers may hold, beside the one in use, until they see queries.
MOST_HELD_BYTES = 2**29


class IncompleteCacheError(RuntimeError):
    """Something ended a change of the cache half-way, and it is used without being reset."""


class DeviceMemoryError(torch.OutOfMemoryError):
    """The device has no room for the keys and values of a layer; the message says what to use instead."""


class LayerStores:
    """
    Makes the stores of a cache's layers, and holds what they share: budgets, counters, memory of the devices.

    Args:
        placement: where the layers live.
        room: to make before the first token.
        num_layers: how many layers will ask for a store.
        codecs: how layers are coded, by index in the model; the others stay in full precision.
        config: of the model, or of its text part, which names the implementation of attention that is in use.

    Raises:
        ValueError: `placement` asks for more resident layers than there are.

    Attributes:
        unfinished: the operation on all layers that something ended half-way.
    """

    def __init__(
        self,
        placement: Placement,
        room: Room,
        num_layers: int,
        codecs: Mapping[int, KVCodec] | None = None,
        config: PreTrainedConfig | None = None,
    ):
        self.placement = placement
        self.config = config
        self.room = room
        allowance = Allowance(len(codecs or {}))
        self._choices = {index: CodecChoice(codec, allowance) for index, codec in (codecs or {}).items()}
        outlook = Outlook(room.device_tokens)
        self.budget = HostBudget(num_layers - len(self._choices), outlook=outlook)
        self.ends_budget = HostBudget(len(self._choices))
        self.record_budget = HostBudget(len(self._choices), GRANULE, outlook)
        self.stats = CacheStats()
        self.attention = CpuAttention(self.stats, is_asked_for=placement.cpu_decode is not None)
        self.stagings: dict[torch.device, Staging] = {}
        self.scratches: dict[torch.device, Scratch] = {}
        self.unfinished: str | None = None
        self._holding: list[CodedStore] = []
        self._resident = placement.resident_ordinals(num_layers)
        self._thread: int | None = None

    @property
    def codecs(self) -> dict[int, KVCodec]:
        """How layers are coded, by index in the model, as far as it is chosen by now."""
        return {index: choice.codec for index, choice in self._choices.items()}

    def attends_on_cpu(self, layer_idx: int, shape: KVShape) -> bool:
        """
        Whether a layer is attended to on the CPU when few tokens come at once.

        Raises:
            ValueError: it was asked for, and there is no kernel for what is stored.
        """
        if self.attention.is_declined or not self.placement.attends_on_cpu(layer_idx, shape.device.type == "cpu"):
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

    @property
    def needs_states(self) -> bool:
        """Whether the model's attention is another function than those that can be asked for the states, or watched."""
        name = getattr(self.config, "_attn_implementation", None)
        return name not in (None, "sdpa", "eager")

    def is_coded(self, layer_idx: int) -> bool:
        """Whether a layer is coded."""
        return layer_idx in self._choices

    def note_thread(self, ordinal: int) -> None:
        """
        Note which thread stores the states of a forward pass, which begins with the first layer.

        Raises:
            RuntimeError: another thread has begun one before this one's ended.
        """
        thread = threading.get_ident()
        if ordinal == 0:
            self._thread = thread
        elif self._thread not in (thread, None):
            raise RuntimeError(
                "Two threads run a model with the same cache at the same time, and their tokens are mixed up in it. "
                "Give each its own cache, or copy.deepcopy(cache) for a prefix that they share, and reset() this one."
            )

    def make(self, layer_idx: int, ordinal: int, shape: KVShape) -> KVStore:
        """
        The store of the layer `layer_idx`, which is the `ordinal`-th full-attention layer.

        Raises:
            ValueError: its codec was chosen for other heads.
        """
        choice = self._choices.get(layer_idx)
        on_cpu = self.attends_on_cpu(layer_idx, shape)
        if choice is None:
            return self._buffered(ordinal, shape, on_cpu, self.room, self.budget)
        codec = choice.codec
        codec.keys.require_fit(shape.num_kv_heads, shape.key_dim)
        codec.values.require_fit(shape.num_kv_heads, shape.value_dim)
        room, budget = Room(full_tokens(codec), full_tokens(codec)), self.ends_budget
        # What is in full precision is small: without attention on the CPU it stays on the device.
        full = self._buffered(ordinal, shape, on_cpu, room, budget) if on_cpu else ResidentStore(shape, room, budget)
        records = RecordStores(self, ordinal, on_cpu)
        return CodedStore(shape, choice, full, records, self.scratches.setdefault(shape.device, Scratch(shape.device)))

    def make_records(self, ordinal: int, shape: KVShape, on_cpu: bool) -> BufferedStore:
        """A store for records of this shape."""
        return self._buffered(ordinal, shape, on_cpu, self.room.of_records(), self.record_budget, records=True)

    def note_holding(self, store: CodedStore) -> None:
        """
        Note that a layer may hold states until it sees queries, and let those that have held longest go.

        Where attention cannot be observed all layers would hold all of their states.
        """
        self._holding = [each for each in self._holding if each is not store and each.held_bytes]
        while self._holding and sum(each.held_bytes for each in self._holding) > MOST_HELD_BYTES:
            self._holding.pop(0).take_held()
        self._holding.append(store)

    def _buffered(
        self, ordinal: int, shape: KVShape, on_cpu: bool, room: Room, budget: HostBudget, records: bool = False
    ) -> BufferedStore:
        if on_cpu and shape.device.type == "cpu":
            return HostStore(shape, room, budget, records)
        if not on_cpu and not self.placement.offload:
            return ResidentStore(shape, room, budget, records)
        if shape.device not in self.stagings:
            streams = streams_for(shape.device)
            evicts = self.placement.on_oom == "evict"
            self.stagings[shape.device] = Staging(streams, self.placement.prefetch_layers, self.stats, evicts)
        # A meta device stands for a CUDA device that is planned for.
        pinned = shape.device.type in ("cuda", "meta") and self.placement.pin_memory is not False
        resident = ordinal in self._resident and not on_cpu
        return StreamedStore(shape, room, budget, self.stagings[shape.device], resident, pinned, records)


@dataclass(frozen=True)
class RecordStores:
    """Makes the stores for the records of one layer, whose size is known once its codec is chosen."""

    stores: LayerStores
    ordinal: int
    on_cpu: bool

    def __call__(self, shape: KVShape) -> BufferedStore:
        return self.stores.make_records(self.ordinal, shape, self.on_cpu)


class HybridLayer(CacheLayerMixin):
    """
    Keys and values of one full-attention layer, kept where the cache's placement says.

    It stands in for transformers' `DynamicLayer`: every token is kept, and `update` returns all of them.

    Args:
        layer_idx: index in the model, for messages.
        ordinal: index among the full-attention layers.
        stores: where the layer gets its store, once the first states tell their shape.

    Attributes:
        store: what the layer holds; `None` before the first states.
        is_attended_on_cpu: whether the store is one for attention on the CPU.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, layer_idx: int, ordinal: int, stores: LayerStores):
        # Not the parent's: it assigns `keys` and `values`, which are read from the store here.
        self.layer_idx = layer_idx
        self._ordinal = ordinal
        self._stores = stores
        self.is_attended_on_cpu = False
        self.store: KVStore | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """All keys on the compute device, `[batch, num_kv_heads, tokens, head_dim]`; `None` before the first."""
        store = self._usable_store()
        return None if store is None else store.read()[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All values, like `keys`."""
        store = self._usable_store()
        return None if store is None else store.read()[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.start(KVShape.of(key_states, value_states))

    def start(self, shape: KVShape) -> KVStore:
        """Make the layer's store, empty, for states of this shape."""
        self._adopt(*self._make_store(shape))
        assert self.store is not None
        return self.store

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Store the states of new tokens and return those of all tokens.

        Args:
            key_states: `[batch, num_kv_heads, new_tokens, head_dim]`.
            value_states: the same, but for its own head_dim where the model has one.
            *args: ignored, as in transformers' `DynamicLayer`.
            **kwargs: ignored likewise.

        Returns:
            Keys and values, `[batch, num_kv_heads, tokens, head_dim]`. Views of what is stored: to be read, not kept
            while tokens are removed. Handles (`handles.py`) where they are attended to on the CPU: to be used
            before the cache changes.

        Raises:
            ValueError: the states do not fit each other, or what is stored.
            RuntimeError: the states require gradients, which a cache that writes in place does not keep; or another
                thread uses the cache at the same time.
            HostMemoryError: host memory would not suffice; nothing has changed then.
            DeviceMemoryError: the memory of the device does not.
            IncompleteCacheError: something ended an earlier change half-way.

        Whatever ends it, the layer holds the tokens of before, or the new ones too, or the next use raises
        `IncompleteCacheError`.
        """
        self._usable_store()
        self._check(key_states, value_states)
        self._stores.note_thread(self._ordinal)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        needs_states = self._stores.needs_states
        if self.is_attended_on_cpu and needs_states:
            self._stores.attention.decline()
        if self.is_attended_on_cpu and self._stores.attention.is_declined:
            self._move(self.store.shape)
        store = self.store
        watched = store if isinstance(store, CodedStore) and store.wants_queries else None
        if watched is not None:
            self._stores.note_holding(watched)
        are_few = key_states.shape[2] <= _FEW_TOKENS
        as_handles = self.is_attended_on_cpu and not needs_states
        if as_handles and store.num_tokens > 0 and (are_few or not _is_streamed(store)):
            store.extend(key_states, value_states)
            return handles_of(store, self._stores.attention)
        try:
            keys, values = store.append(key_states, value_states)
            return (keys if watched is None or needs_states else observed(keys, watched.observe)), values
        except torch.OutOfMemoryError as error:
            raise self._device_memory_error(key_states.shape[2], error) from error

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover when `query_length` tokens come next."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` tokens, or all if there are not that many.

        Raises:
            ValueError: a positive number, which older versions of transformers took for the length to keep.
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor in assisted decoding, before transformers 5.23
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is ambiguous: pass a negative number of tokens to remove. To keep "
                f"{tokens_to_remove} of {self.get_seq_length()} tokens, use "
                f"crop({min(0, tokens_to_remove - self.get_seq_length())})."
            )
        store = self._usable_store()
        if store is not None:
            store.truncate(max(0, store.num_tokens + tokens_to_remove))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """
        Move what is stored to where a model on `device` uses it, as `dtype` or as it is.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
        """
        store = self.store
        if store is None or not store.is_intact:  # what is not whole says so at its next use
            return
        now = store.shape
        shape = now._replace(device=device, key_dtype=dtype or now.key_dtype, value_dtype=dtype or now.value_dtype)
        if shape != now:
            self._move(shape)

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence `i` what sequence `beam_idx[i]` was."""
        self._select_batch(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, copies side by side."""
        if self.store is not None:
            self._select_batch(torch.arange(self.store.shape.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that `indices` (integers or a boolean mask) selects, in that order."""
        if self.store is not None:
            self._select_batch(torch.arange(self.store.shape.batch)[torch.as_tensor(indices, device="cpu")])

    def require_whole(self) -> None:
        """
        Check that nothing has ended a change of the cache half-way.

        Raises:
            IncompleteCacheError: something has.
        """
        self._usable_store()

    def offload(self) -> None:
        """Nothing to do: the placement decides where a layer lives."""

    def prefetch(self) -> None:
        """Nothing to do: a layer fetches those that follow it."""

    def _move(self, shape: KVShape) -> None:
        """Put what is stored into a store for `shape`."""
        old = self.store
        assert old is not None
        new, is_attended_on_cpu = self._make_store(shape)
        try:
            new.take_from(old)
        except BaseException:
            new.close()
            raise
        self._adopt(new, is_attended_on_cpu)
        old.close()

    def _make_store(self, shape: KVShape) -> tuple[KVStore, bool]:
        """A store, and whether it is attended to on the CPU."""
        on_cpu = self._stores.attends_on_cpu(self.layer_idx, shape)
        if on_cpu:
            assert shape.element is not None
            self._stores.attention.prepare(shape.element, self._stores.is_coded(self.layer_idx))
        return self._stores.make(self.layer_idx, self._ordinal, shape), on_cpu

    def _adopt(self, store: KVStore, is_attended_on_cpu: bool) -> None:
        # Nothing is called between the two, so that no interruption comes between them.
        self.store = store
        self.is_attended_on_cpu = is_attended_on_cpu

    def _usable_store(self) -> KVStore | None:
        """The store, if it is whole."""
        store = self.store
        if self._stores.unfinished is not None or (store is not None and not store.is_intact):
            raise IncompleteCacheError(
                f"An error or an interruption ended {self._stores.unfinished or f'a change of layer {self.layer_idx}'} "
                "half-way, so what is stored is not whole. Call cache.reset(), or use a new cache."
            )
        return store

    def _device_memory_error(self, new_tokens: int, error: torch.OutOfMemoryError) -> DeviceMemoryError:
        assert self.store is not None
        if self._stores.placement.offload:
            advice = "Pass prefill_chunk_size=512 to generate, or fewer resident_layers or cpu_decode=True to the cache"
        else:
            advice = "Use OffloadedHybridCache, which keeps them in host memory, or QuantizedHybridCache(offload=True)"
        return DeviceMemoryError(
            f"The device has no room for {new_tokens:,} more tokens of layer {self.layer_idx}, which holds "
            f"{self.store.num_tokens:,} ({self.store.shape}). {advice}; `hf-hybrid-cache plan` tells what fits. "
            f"The device said: {str(error).splitlines()[0]}"
        )

    def _select_batch(self, indices: torch.Tensor) -> None:
        store = self._usable_store()
        if store is not None and store.num_tokens > 0:
            store.select_batch(indices)

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.device != values.device:
            raise ValueError(
                "Keys and values must be [batch, num_kv_heads, tokens, head_dim] with the same first three sizes on "
                f"one device, got {list(keys.shape)} on {keys.device} and {list(values.shape)} on {values.device}."
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                "This cache writes in place and keeps no gradients, but the new states require them. Run the model "
                "under torch.no_grad() or torch.inference_mode(), or train with transformers' DynamicCache."
            )
        if self.store is None:
            return
        shape = KVShape.of(keys, values)
        if shape == self.store.shape:
            return
        if self.store.num_tokens > 0:
            raise ValueError(
                f"Layer {self.layer_idx} holds {self.store.num_tokens:,} tokens of {self.store.shape}; the new states "
                f"are {shape}. Use a new cache or cache.reset() for other inputs, or change this one's batch with "
                "batch_repeat_interleave or batch_select_indices."
            )
        self.reset()


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Tensors that a layer of transformers' own keeps, in attributes or in dicts of them."""
    for value in vars(layer).values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def move_tensors_of(layer: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move those tensors to `device`, floating ones as `dtype`."""

    def moved(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, dtype if item.is_floating_point() else None)
        return item

    for name, value in vars(layer).items():
        setattr(
            layer, name, {key: moved(item) for key, item in value.items()} if isinstance(value, dict) else moved(value)
        )
    if getattr(layer, "is_initialized", False) and hasattr(layer, "device"):
        layer.device, layer.dtype = device, dtype or layer.dtype


def _is_streamed(store: KVStore) -> bool:
    """Whether there is an accelerator, which is the better place for attention of many tokens."""
    return isinstance(store.records if isinstance(store, CodedStore) else store, StreamedStore)
