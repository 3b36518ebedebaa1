"""One full-attention layer of a hybrid cache."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..attention import MAX_QUERIES, KeyIndex, QuantizedAttention, handles_of, observed
from ..storage import (
    GRANULE,
    AnyStore,
    ChunkStore,
    KVShape,
    Pair,
    RecentStates,
    SharedPrefix,
    Store,
    TokenBuffer,
)
from .errors import DeviceMemoryError, IncompleteCacheError
from .layer_stores import LayerStores
from .lent_states import LentStates

# Largest number of tokens that assisted decoding checks at once.
_FEW_TOKENS = 16


class HybridLayer(CacheLayerMixin):
    """
    Keys and values of one full-attention layer, kept where the cache's placement says.

    It stands in for transformers' `DynamicLayer`: every token is kept, and `update` returns all of them.

    Args:
        layer_idx: index in the model, for messages.
        ordinal: index among the full-attention layers.
        stores: where the layer gets its store, once the first states tell their shape.

    Attributes:
        is_attended_on_cpu: whether the store is one for attention on the CPU.
        is_attended_quantized: whether a kernel attends to its quantized blocks on the device of the model.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, layer_idx: int, ordinal: int, stores: LayerStores):
        # Not the parent's: it assigns `keys` and `values`, which are read from the store here.
        self.layer_idx = layer_idx
        self._ordinal = ordinal
        self._stores = stores
        self._selection = stores.selection_of(layer_idx)
        self._quantized_attention = QuantizedAttention()
        self.is_attended_on_cpu = self.is_attended_quantized = False
        self._store: AnyStore | None = None
        self._lent: LentStates | None = None

    @property
    def store(self) -> AnyStore | None:
        """The layer's store, with the edits that a caller has made; `None` before the first states."""
        self.take_edits()
        return self._store

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._store is not None

    @property
    def device(self) -> torch.device:
        """Device of the states that come and go; missing before the first states, as in transformers' layer."""
        return self._states_shape().device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys; missing before the first states, as in transformers' layer."""
        return self._states_shape().key_dtype

    def _states_shape(self) -> KVShape:
        if self._store is None:
            raise AttributeError(f"Layer {self.layer_idx} has no device and no dtype before its first states.")
        return self._store.shape

    @property
    def batch(self) -> int | None:
        """Number of sequences that are stored; `None` if none are."""
        return self._store.shape.batch if self._store is not None and self._store.num_tokens else None

    @property
    def keys(self) -> torch.Tensor | None:
        """
        All keys on the compute device, `[batch, num_kv_heads, tokens, head_dim]`; `None` before the first.

        They are a copy that the layer does not change. If operations of torch write to it in place, or other keys are
        assigned, the next use of the layer stores that, as by `set`. After new tokens the copy is the caller's alone.
        """
        return self._lend(0)

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._assign(0, states)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, like `keys`."""
        return self._lend(1)

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._assign(1, states)

    def set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Replace the stored states.

        In a quantized layer the tokens before the first one that differs keep their codes; the others are quantized
        again as new tokens are.

        Args:
            keys: `[batch, num_kv_heads, tokens, head_dim]`.
            values: the same, but for its own head_dim where the model has one.

        Raises:
            ValueError: they do not fit each other, or there are no codes for some of them.
            RuntimeError: several processes keep shards of the layer.
            HostMemoryError: host memory would not suffice.

        The layer is unchanged after an error.
        """
        self._require_states(keys, values)
        self._lent = None
        old = self._usable_store()
        self._require_own(old)
        shape = KVShape.of(keys, values)
        if old is None or old.shape != shape:
            self._replace_store(shape, lambda new: new.extend(keys, values))
            return
        held = old.read()
        first = _first_difference(held, (keys, values))
        if first == old.num_tokens == keys.shape[2]:
            return
        if old.is_continued and first < old.least_tokens:  # too few are left for a prefix
            self._replace_store(shape, lambda new: new.extend(keys, values))
            return
        try:
            self._truncate(old, first)
            old.extend(keys[:, :, first:], values[:, :, first:])
        except BaseException:
            if old.is_intact:
                self._truncate(old, first)
                old.extend(*(states[:, :, first:] for states in held))
            raise

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.start(KVShape.of(key_states, value_states))

    def start(self, shape: KVShape) -> Store:
        """Make the layer's store, empty, for states of this shape."""
        store, is_attended_on_cpu = self._make_store(shape)
        self._adopt(store, is_attended_on_cpu)
        return store

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
            Keys and values, `[batch, num_kv_heads, tokens, head_dim]`, to be read and not written to. They are handles
            (`handles.py`) if attention runs over the store: use them before the cache changes.

        Raises:
            ValueError: the states do not fit each other, or the stored ones.
            RuntimeError: the states require gradients, which a cache that writes in place does not keep; or another
                thread uses the cache at the same time.
            HostMemoryError: host memory would not suffice; nothing has changed then.
            DeviceMemoryError: the memory of the device would not suffice.
            IncompleteCacheError: something ended an earlier change half-way.

        After any error the layer holds the tokens of before, or the new ones too, or the next use raises
        `IncompleteCacheError`.
        """
        self._usable_store()
        self._lent = None
        key_states, value_states = self.fitting(key_states, value_states)
        self._stores.note_pass(self._ordinal)
        if self._store is None:
            self.lazy_initialization(key_states, value_states)
        assert self._store is not None
        needs_states = self._stores.needs_states
        if self.is_attended_on_cpu or self._store.is_continued:  # where it is
            if needs_states:
                what = f"attn_implementation={self._stores.implementation!r}"
                self._stores.attention.decline(what, self._store.num_tokens)
            if self._stores.attention.is_declined:
                self._move(self._store.shape)
        store = self._store
        watched = store if store.wants_queries else None
        if watched is not None:
            self._stores.note_holding(watched)
        are_few = key_states.shape[2] <= _FEW_TOKENS
        as_handles = not needs_states and (store.num_tokens > 0 or self._takes_prompts(store))
        chunk = None if needs_states else self._chunk_to_quantize(store, key_states, value_states)
        if chunk is not None and store.num_tokens > 0:
            store.extend(key_states, value_states)
            return handles_of(chunk, self._stores.attention)
        if as_handles and self.is_attended_on_cpu and (are_few or store.streamed is None):
            self._store_for_cpu(store, key_states, value_states)
            return handles_of(store, self._stores.attention, self._selection)
        try:
            in_segments = store.is_continued or (are_few and self._is_attended_in_segments(store, key_states.shape[2]))
            if as_handles and in_segments:
                store.stage(key_states, value_states)
                return handles_of(store, self._stores.attention)
            if as_handles and are_few and self._is_attended_quantized_now(store):
                store.stage(key_states, value_states)
                return handles_of(store, self._quantized_attention)
            keys, values = store.append(key_states, value_states)
            if chunk is not None:
                return handles_of(chunk, self._stores.attention)
            return (keys if watched is None or needs_states else observed(keys, watched.observe)), values
        except torch.OutOfMemoryError as error:
            raise self._device_memory_error(key_states.shape[2], error) from error

    def _is_attended_quantized_now(self, store: AnyStore) -> bool:
        """Return whether a kernel on the device attends to all of the store, quantized as it is."""
        in_one_place = not store.is_continued and store.ends is None
        return in_one_place and self.is_attended_quantized and not self._quantized_attention.is_declined

    def _takes_prompts(self, store: AnyStore) -> bool:
        """Return whether attention of the first tokens runs over the store, too."""
        return self.is_attended_on_cpu and self._stores.attention.takes_prompts(store)

    def _chunk_to_quantize(self, store: AnyStore, keys: torch.Tensor, values: torch.Tensor) -> ChunkStore | None:
        """Return new tokens to attend to in full precision, if `store`, which takes them next, quantizes them."""
        if store.is_continued or (store.num_tokens and not self._stores.sees_as_alone):
            return None
        fewest = MAX_QUERIES if store.num_tokens else _FEW_TOKENS
        takes_chunks = (
            self.is_attended_on_cpu
            and keys.shape[2] > fewest
            and store.quantized is not None
            and not store.pending_bytes
            and store.ends is None
            and store.streamed is None
            and self._stores.peers is None
            and store.shape.device.type == "cpu"
            and self._stores.attention.has_kernel_for_many(store.shape)
        )
        return ChunkStore(store, keys, values) if takes_chunks else None

    def _store_for_cpu(self, store: AnyStore, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states for attention on the CPU to all or a part of the tokens in host memory."""
        held = store.num_tokens
        has_middle = store.layout.after(held + keys.shape[2]).host_tokens > 0
        if has_middle and store.cpu_fraction is not None and store.cpu_fraction.fraction < 1:
            try:
                store.stage(keys, values)
                return
            except torch.OutOfMemoryError:
                if store.num_tokens != held or not store.is_intact:
                    raise
                store.cpu_fraction.give_up_streaming(held)
        store.extend(keys, values)

    def get_seq_length(self) -> int:
        lent, store = self._lent, self._store
        if lent is not None and (assigned := lent.assigned_tokens) is not None:
            return assigned
        return 0 if store is None else store.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that a mask must cover when `query_length` tokens come next."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, because there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` tokens, or all if there are not that many.

        Raises:
            ValueError: a positive number, which older versions of transformers took for the length to keep.
        """
        tokens_to_remove = checked_removal(tokens_to_remove, self.get_seq_length())
        store = self._usable_store()
        if store is not None:
            self._lent = None
            self._truncate(store, max(0, store.num_tokens + tokens_to_remove))

    def recent_states(self) -> RecentStates | None:
        """Copy the states that later tokens would quantize; `None` if the layer is not quantized, or empty."""
        store = self._usable_store()
        return store.recent_states() if store is not None and self._stores.is_quantized(self.layer_idx) else None

    def go_back(self, num_tokens: int, recent: RecentStates | None) -> None:
        """
        Keep the first `num_tokens`, in full precision where they were when `recent_states` told so.

        Raises:
            HostMemoryError: host memory would not suffice.
        """
        self.crop((num_tokens if recent is None else recent.start) - self.get_seq_length())
        if recent is not None and recent.keys.shape[2]:
            assert self._store is not None
            self._store.extend_recent(recent)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """
        Move the stored states to the place where a model on `device` uses them, as `dtype` or with their type.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
        """
        store = self._store
        if store is None or not store.is_intact:  # a store that is not whole raises at its next use
            return
        now = store.shape
        shape = now._replace(device=device, key_dtype=dtype or now.key_dtype, value_dtype=dtype or now.value_dtype)
        if shape != now:
            self._move(shape)

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        self._lent = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._selection is not None:
            self._selection.reset()
        self._quantized_attention.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence `i` what sequence `beam_idx[i]` was."""
        self._select_batch(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side; they share whole blocks where `shares_copies`."""
        store = self._usable_store()
        if store is None:
            return
        if repeats > 1 and not store.is_continued and self.shares_copies:
            self._lent = None
            tails = self.make_tails(repeats * store.shape.batch)
            self._adopt(SharedPrefix.continuing(store, tails), self.is_attended_on_cpu)
        else:
            self._select_batch(torch.arange(store.shape.batch).repeat_interleave(repeats))

    def make_tails(self, batch: int) -> Store:
        """Make an empty store for the tokens of `batch` sequences that continue the stored ones."""
        assert self._store is not None
        shape = self._store.shape._replace(batch=batch)
        return self._stores.make(self.layer_idx, self._ordinal, shape, after_prefix=True)

    def continue_with(self, tails: Store) -> None:
        """
        Make the stored sequences prefixes of the sequences in `tails`, several for each.

        Raises:
            ValueError: the stored tokens are no whole blocks.
            HostMemoryError: they have to be copied for each sequence, and host memory would not suffice.
        """
        store = self._store
        assert store is not None
        assert not store.is_continued
        if store.num_tokens % GRANULE or tails.shape.batch % store.shape.batch:
            raise ValueError(f"{tails.shape} cannot follow {store.num_tokens:,} tokens of {store.shape}")
        shared = SharedPrefix(store, tails)
        if self.shares_copies:
            self._adopt(shared, self.is_attended_on_cpu)
        else:
            self._replace_store(shared.shape, lambda new: new.take_from(shared))

    @property
    def shares_copies(self) -> bool:
        """Whether copies of a sequence share its blocks."""
        store = self._store
        if store is None or store.is_continued:
            return store is not None
        return self._stores.can_be_continued(store, store.num_shareable, self.is_attended_on_cpu)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that `indices` (integers or a boolean mask) selects, in that order."""
        if self._store is not None:
            self._select_batch(torch.arange(self._store.shape.batch)[torch.as_tensor(indices, device="cpu")])

    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""
        index, store = () if self._selection is None else self._selection.index.buffers(), self._store
        return *(() if store is None else store.buffers()), *index

    @property
    def pending(self) -> tuple[Pair, ...]:
        """Keys and values that wait until the codec is chosen, in pieces."""
        store = self._store
        return () if store is None else store.pending

    @property
    def index(self) -> KeyIndex | None:
        """The index by which attention chooses the pages to read; `None` if it reads all."""
        if self._selection is None or self._selection.reads_all or not self.is_attended_on_cpu:
            return None
        return self._selection.index

    @property
    def always_chooses(self) -> bool:
        """Whether attention of few queries reads a part of the pages, however large the part is."""
        return self.index is not None and self._selection is not None and self._selection.most == 1

    def require_whole(self) -> None:
        """
        Check that nothing has ended a change of the cache half-way.

        Raises:
            IncompleteCacheError: a change has ended half-way.
        """
        self._usable_store()

    def offload(self) -> None:
        """Do nothing: the placement decides where a layer lives."""

    def prefetch(self) -> None:
        """Do nothing: a layer fetches those that follow it."""

    @property
    def lent_bytes(self) -> int:
        """Bytes that are kept because a caller may write to them."""
        return 0 if self._lent is None else self._lent.held_bytes

    @property
    def is_lending(self) -> bool:
        """Whether a caller has read states since tokens came."""
        return self._lent is not None

    def let_lent_go(self) -> None:
        """Store the edits of a caller, and keep no memory for more."""
        self.take_edits()
        if self._lent is not None:
            self._lent.let_go()

    def _lend(self, role: int) -> torch.Tensor | None:
        """Return the keys (0) or the values (1), for a caller to keep or to edit."""
        states = None if self._lent is None else self._lent.get(role)
        if states is not None or (self._store is None and self._lent is not None):
            return states
        store = self._usable_store()
        if store is None:
            return None
        with torch.inference_mode(False):
            self._lent = LentStates(store.read_copy())
        self._stores.recently_lent.note(self)
        return self._lent.get(role)

    def _assign(self, role: int, states: torch.Tensor | None) -> None:
        if not isinstance(states, torch.Tensor) or states.dim() != 4:
            given = list(states.shape) if isinstance(states, torch.Tensor) else type(states).__name__
            raise ValueError(
                f"Layer {self.layer_idx} takes keys and values [batch, num_kv_heads, tokens, head_dim], got {given}. "
                "To forget them call reset()."
            )
        self._lend(role)
        if self._lent is None:
            self._lent = LentStates(None)
            self._stores.recently_lent.note(self)
        self._lent.assign(role, states)

    def take_edits(self) -> None:
        """
        Store the edits of a caller: writes to states that were read, and assigned states.

        Raises:
            RuntimeError: the edited states are not there any more, or only keys or only values were assigned.
            ValueError: keys and values do not fit each other, or there are no codes for some of them.
        """
        lent = self._lent
        if lent is None or not lent.is_edited:
            return
        self._require_own(self._store)
        stored = (None, None) if self._store is None else self._store.read()
        keys, values = (lent.edited(role, states) for role, states in enumerate(stored))
        if keys is None or values is None:
            if lent.assigned_tokens is None:
                self._lent = None
            lost = "keys" if keys is None else "values"
            raise RuntimeError(
                f"Layer {self.layer_idx} was edited and has no {lost}: they were written to and are gone, or only the "
                "others were assigned. Call layer.set(keys, values) with both."
            )
        self.set(keys, values)
        if lent.assigned_tokens is None:
            lent.forget_edits()
            self._lent = lent

    def _require_own(self, store: AnyStore | None) -> None:
        if store is not None and self._stores.peers is not None:
            self._lent = None
            raise RuntimeError(
                f"Layer {self.layer_idx} is shared by {self._stores.num_processes} processes, and its states cannot be "
                "set, or edited in place. Edit a cache without group=, save it, and load it with group=."
            )

    def _truncate(self, store: AnyStore, num_tokens: int) -> None:
        if store.is_continued and num_tokens < store.least_tokens:
            states = store.read_prefix(num_tokens)
            self._replace_store(store.shape, lambda new: new.extend(*states))
            return
        if self._selection is not None:
            layout, tokens = store.indexed.layout, min(num_tokens, store.indexed.num_tokens)
            self._selection.index.truncate(layout.cropped(tokens).host_tokens if layout.device_tokens else tokens)
        store.truncate(num_tokens)

    def _move(self, shape: KVShape) -> None:
        """Move the stored states to a store for `shape`."""
        old = self._store
        assert old is not None
        self._replace_store(shape, lambda new: new.take_from(old))

    def _replace_store(self, shape: KVShape, fill: Callable[[Store], None]) -> None:
        """Replace the store, if there is one, by a store for `shape` that `fill` fills."""
        old = self._store
        new, is_attended_on_cpu = self._make_store(shape)
        try:
            fill(new)
        except BaseException:
            new.close()
            raise
        self._lent = None
        self._adopt(new, is_attended_on_cpu)
        if self._selection is not None:
            self._selection.reset()
        if old is not None:
            old.close()

    def _make_store(self, shape: KVShape) -> tuple[Store, bool]:
        """Make a store; return it, and whether attention to it runs on the CPU."""
        on_cpu = self._stores.attends_on_cpu(self.layer_idx, self._ordinal, shape)
        if on_cpu:
            assert shape.element is not None
            is_quantized, is_selected = self._stores.is_quantized(self.layer_idx), self._selection is not None
            self._stores.attention.prepare(shape.element, is_quantized, is_selected)
        return self._stores.make(self.layer_idx, self._ordinal, shape), on_cpu

    def _adopt(self, store: AnyStore, is_attended_on_cpu: bool) -> None:
        is_attended_quantized = self._stores.attends_quantized(self.layer_idx, self._ordinal, store.shape)
        # Nothing is called between these, so that no interruption comes between them.
        self._store = store
        self.is_attended_on_cpu = is_attended_on_cpu
        self.is_attended_quantized = is_attended_quantized

    def _usable_store(self) -> AnyStore | None:
        """Return the store if it is whole."""
        self.take_edits()
        store = self._store
        if self._stores.unfinished is not None or (store is not None and not store.is_intact):
            raise IncompleteCacheError(
                f"An error or an interruption ended {self._stores.unfinished or f'a change of layer {self.layer_idx}'} "
                "half-way, so what is stored is not whole. Call cache.reset(), or use a new cache."
            )
        return store

    def _is_attended_in_segments(self, store: AnyStore, new_tokens: int) -> bool:
        """Return whether the device attends in segments: to its own tokens, and to those streamed from host memory."""
        attends_elsewhere = self.is_attended_on_cpu or self._stores.attention.is_declined
        return not attends_elsewhere and store.layout.after(store.num_tokens + new_tokens).host_tokens > 0

    def _device_memory_error(self, new_tokens: int, error: torch.OutOfMemoryError) -> DeviceMemoryError:
        assert self._store is not None
        if self._stores.placement.offload:
            advice = "Pass prefill_chunk_size=512 to generate, or fewer resident_layers or cpu_decode=True to the cache"
        else:
            advice = "Use OffloadedHybridCache, which keeps them in host memory, or QuantizedHybridCache(offload=True)"
        return DeviceMemoryError(
            f"The device has no room for {new_tokens:,} more tokens of layer {self.layer_idx}, which holds "
            f"{self._store.num_tokens:,} ({self._store.shape}). {advice}; `hf-hybrid-cache plan` tells what fits. "
            f"The device said: {str(error).splitlines()[0]}"
        )

    def _select_batch(self, indices: torch.Tensor) -> None:
        store = self._usable_store()
        self._lent = None
        if store is not None and store.num_tokens > 0:
            of_indexed = store.indices_of_indexed(indices)
            if self._selection is None or of_indexed is None:
                store.select_batch(indices)
                return
            with self._selection.index.following(of_indexed):
                store.select_batch(indices)

    @staticmethod
    def _require_states(keys: torch.Tensor, values: torch.Tensor) -> None:
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

    def fitting(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return new states that can follow the stored ones, which move to the device of the new ones.

        Types are promoted as by `torch.cat`, which transformers' layers use, unless the query's type would be another.

        Raises:
            ValueError: the states do not fit each other, or the stored ones.
            RuntimeError: the states require gradients.
        """
        self._require_states(keys, values)
        store, shape = self._store, KVShape.of(keys, values)
        if store is None or shape == store.shape:
            return keys, values
        if store.num_tokens == 0:
            self.reset()
            return keys, values
        common = shape.promoted_with(store.shape)
        fits = common == store.shape._replace(
            device=common.device, key_dtype=common.key_dtype, value_dtype=common.value_dtype
        )
        # Under autocast attention converts its arguments.
        if not fits or (common != shape and not torch.is_autocast_enabled(shape.device.type)):
            raise ValueError(
                f"Layer {self.layer_idx} holds {store.num_tokens:,} tokens of {store.shape}; the new states are "
                f"{shape}. Use a new cache or cache.reset() for other inputs, or change this one's batch with "
                "batch_repeat_interleave or batch_select_indices, its type with cache.to(dtype)."
            )
        if common != store.shape:
            self._move(common)
        return keys.to(common.key_dtype), values.to(common.value_dtype)


def checked_removal(tokens_to_remove: int, num_tokens: int) -> int:
    """
    Return the argument of `crop` as an integer.

    Raises:
        ValueError: it is positive, which older versions of transformers took for the length to keep.
    """
    removal = int(tokens_to_remove)  # a tensor in assisted decoding, before transformers 5.23
    if removal > 0:
        raise ValueError(
            f"crop({removal}) is ambiguous: pass a negative number of tokens to remove. To keep {removal} of "
            f"{num_tokens} tokens, use crop({min(0, removal - num_tokens)})."
        )
    return removal


def _first_difference(held: Pair, states: Pair) -> int:
    """Return the first token whose keys or values differ; if there is none, the number of tokens that both have."""
    tokens = min(held[0].shape[2], states[0].shape[2])
    differ = torch.zeros(tokens, dtype=torch.bool, device=held[0].device)
    for old, new in zip(held, states, strict=True):
        differ |= (old[:, :, :tokens] != new[:, :, :tokens]).any(dim=3).any(dim=1).any(dim=0)
    return int(differ.to(torch.uint8).argmax()) if differ.any() else tokens
