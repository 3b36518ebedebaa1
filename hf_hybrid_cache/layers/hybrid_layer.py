"""One full-attention layer of a hybrid cache."""

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..attention import (
    QuantizedAttention,
    StoredAttention,
    handles_of,
    observed,
)
from ..kernels import compile_in_background
from ..storage import (
    AnyStore,
    KVShape,
    OneSequence,
    RecentStates,
    SharedPrefix,
    SplitStore,
    Store,
    TokenBuffer,
)
from .errors import DeviceMemoryError, IncompleteCacheError
from .layer_stores import LayerStores, Place

# Largest number of tokens that assisted decoding checks at once.
_MOST_DRAFTED = 16


class HybridLayer(CacheLayerMixin):
    """
    Keys and values of one full-attention layer, kept where the cache's placement says.

    It stands in for transformers' `DynamicLayer`: every token is kept, and `update` returns all of them.

    Args:
        layer_idx: index in the model, for messages.
        stores: where the layer gets its store, once the first states tell their shape.

    Attributes:
        store: of the layer; `None` before the first states.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, layer_idx: int, stores: LayerStores):
        # Not the parent's: it assigns `keys` and `values`, which are read from the store here.
        self.layer_idx = layer_idx
        self._stores = stores
        self._quantized_attention = QuantizedAttention()
        self.store: AnyStore | None = None
        self._place: Place | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store is not None

    @property
    def device(self) -> torch.device:
        """Device of the states that come and go; missing before the first states, as in transformers' layer."""
        return self.store.shape.device  # type: ignore[union-attr]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys; missing before the first states, as in transformers' layer."""
        return self.store.shape.key_dtype  # type: ignore[union-attr]

    @property
    def is_attended_on_cpu(self) -> bool:
        """Whether the store is, or was, one for attention on the CPU."""
        return self._place is not None and self._place.on_cpu

    @property
    def batch(self) -> int | None:
        """Number of sequences that are stored; `None` if none are."""
        return self.store.shape.batch if self.store is not None and self.store.num_tokens else None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """
        All keys on the compute device, `[batch, num_kv_heads, tokens, head_dim]`; `None` before the first.

        They are a copy to be read: torch refuses writes to it outside `torch.inference_mode`, and inside they are lost.
        `set` replaces what is stored.
        """
        return self._read(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All values, like `keys`."""
        return self._read(1)

    def _read(self, role: int) -> torch.Tensor | None:
        store, stores = self.usable_store(), self._stores
        if store is None:
            return None
        if stores.last_read[:2] != (store, store.version):
            with torch.inference_mode():
                stores.last_read = store, store.version, store.read_copy()
        return stores.last_read[2][role]

    def set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Replace the stored states.

        A quantized layer quantizes all of them again. All checkpoints are dropped.

        Args:
            keys: `[batch, num_kv_heads, tokens, head_dim]`.
            values: the same, but for its own head_dim where the model has one.

        Raises:
            ValueError: they do not fit each other, or there are no codes for some of them.
            RuntimeError: they require gradients, or several processes keep shards of the layer.
            HostMemoryError: host memory would not suffice.

        The layer is unchanged after an error.
        """
        if self._stores.peers is not None:
            raise RuntimeError(
                f"Layer {self.layer_idx} is shared by {self._stores.peers.size} processes, and its states cannot be "
                "set. Edit a cache without group=, save it, and load it with group=."
            )
        shape = KVShape.of(keys, values)
        require_no_gradients(keys, values)
        self.usable_store()
        self._stores.num_edits += 1
        self._stores.drop_checkpoints()
        self.start(shape, lambda new: new.add(keys, values))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.start(KVShape.of(key_states, value_states))

    def place_for(self, shape: KVShape) -> Place:
        """Return the place where states of this shape are kept."""
        return self._stores.place_of(self.layer_idx, shape)

    def start(self, shape: KVShape, fill: Callable[[OneSequence], object] = lambda new: None) -> OneSequence:
        """Make the layer's store for states of this shape, which `fill` fills, in the place of one that there is."""
        old = self.store
        place = self.place_for(shape)
        if place.on_cpu:
            assert shape.element is not None
            compile_in_background(shape.element, place.choice is not None)
        new = place.make(shape)
        try:
            fill(new)
        except BaseException:
            new.close()
            raise
        # Nothing is called between these, so that no interruption comes between them.
        self.store, self._place = new, place
        if old is not None:
            old.close()
        return new

    def _move(self, shape: KVShape) -> None:
        """Move the stored states to a store for `shape`."""
        old = self.store
        assert old is not None
        self._stores.num_edits += 1
        self.start(shape, lambda new: new.take_from(old))

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
        self.usable_store()
        key_states, value_states = self.fitting(key_states, value_states)
        stores = self._stores
        if self.layer_idx == stores.first_layer or stores.thread != get_ident():
            stores.note_pass(self.layer_idx)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        assert self._place is not None
        if self._place.on_cpu or isinstance(self.store, SharedPrefix):  # where it is
            if stores.needs_states:
                stores.attention.decline(f"attn_implementation={stores.implementation!r}", self.store.num_tokens)
            if stores.attention.is_declined:
                self._move(self.store.shape)
        store, new_tokens = self.store, key_states.shape[2]
        watched = store if store.wants_queries else None
        if watched is not None:
            stores.note_waiting(watched)
        if self._place.on_cpu and not stores.needs_states:
            is_prompt = not store.num_tokens and new_tokens > _MOST_DRAFTED and stores.peers is None
            # A sequence's first tokens are attended to as they came, though the store packs them.
            if is_prompt and store.layout.is_quantized and stores.attention.takes_prompts(store, as_they_came=True):
                assert isinstance(store, Store)
                return handles_of(store, stores.attention, *store.add_first(key_states, value_states))
            takes_handles = store.num_tokens > 0 or stores.attention.takes_prompts(store)
            takes_chunks = not self.is_sliding and store.streamed is None
            if takes_handles and (new_tokens <= _MOST_DRAFTED or takes_chunks):
                if store.cpu_fraction is None or not self._add_beside_device(store, key_states, value_states):
                    store.add(key_states, value_states)
                return handles_of(store, stores.attention)
        attention = self._attention_on_device(store, new_tokens)
        try:
            if attention is not None:
                store.add(key_states, value_states, on_device=True)
                return handles_of(store, attention)
            keys, values = store.append(key_states, value_states)
        except torch.OutOfMemoryError as error:
            raise self._device_memory_error(new_tokens, error) from error
        return (keys if watched is None or stores.needs_states else observed(keys, watched.observe)), values

    def _attention_on_device(self, store: AnyStore, new_tokens: int) -> StoredAttention | QuantizedAttention | None:
        """Return what attends to the tokens where they are on the device; `None` if they are put together for it."""
        attention = self._stores.attention
        if self._stores.needs_states or not store.num_tokens:
            return None
        if isinstance(store, SharedPrefix):
            return attention
        assert self._place is not None
        if new_tokens > _MOST_DRAFTED or self._place.on_cpu:
            return None
        if isinstance(store, SplitStore) and store.host_tokens_with(new_tokens):
            return None if attention.is_declined else attention
        takes_codes = self._place.on_codes and isinstance(store, Store) and not self._quantized_attention.is_declined
        return self._quantized_attention if takes_codes else None

    @staticmethod
    def _add_beside_device(store: AnyStore, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Store new states for the CPU and the device, if there is a fraction for each; return whether there is."""
        fraction, held = store.cpu_fraction, store.num_tokens
        assert fraction is not None
        assert isinstance(store, SplitStore)
        if fraction.fraction == 1 or not store.host_tokens_with(keys.shape[2]):
            return False
        try:
            store.add(keys, values, on_device=True)
        except torch.OutOfMemoryError:
            if store.num_tokens != held or not store.is_intact:
                raise
            fraction.give_up_streaming(held)
            return False
        return True

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.num_tokens

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
        store = self.usable_store()
        if store is not None:
            left = max(0, store.num_tokens + tokens_to_remove)
            self._stores.drop_checkpoints(after=left)
            self._truncate(store, left)

    def recent_states(self) -> RecentStates | None:
        """Copy the states that later tokens would quantize; `None` if the layer is not quantized, or empty."""
        store = self.usable_store()
        return None if store is None or not store.layout.is_quantized else store.recent_states()

    def go_back(self, num_tokens: int, recent: RecentStates | None) -> None:
        """
        Keep the first `num_tokens`, in full precision where they were when `recent_states` told so.

        Raises:
            HostMemoryError: host memory would not suffice.
        """
        self.crop((num_tokens if recent is None else recent.start) - self.get_seq_length())
        if recent is not None and recent.states[0].shape[2]:
            assert self.store is not None
            self.store.extend_recent(recent)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """
        Move the stored states to the place where a model on `device` uses them, as `dtype` or with their type.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
        """
        store = self.store
        if store is None or not store.is_intact:  # a store that is not whole raises at its next use
            return
        now = store.shape
        shape = now._replace(device=device, key_dtype=dtype or now.key_dtype, value_dtype=dtype or now.value_dtype)
        if shape != now:
            self._move(shape)

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        self._stores.drop_checkpoints()
        self._stores.last_read = (None,)
        if self.store is not None:
            self.store.close()
            self.store = None
        self._quantized_attention.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence `i` what sequence `beam_idx[i]` was."""
        store = self.usable_store()
        if store is not None and store.num_tokens > 0:
            self._stores.drop_checkpoints()
            store.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side; they share whole blocks where `shares_copies`."""
        store = self.usable_store()
        if store is None:
            return
        if repeats > 1 and not isinstance(store, SharedPrefix) and self.shares_copies:
            self._stores.drop_checkpoints()
            assert self._place is not None
            tails = self._place.make(store.shape._replace(batch=repeats * store.shape.batch), after_prefix=True)
            self.store = SharedPrefix.continuing(store, tails)
        else:
            self.reorder_cache(torch.arange(store.shape.batch).repeat_interleave(repeats))

    def join(self) -> None:
        """Keep a prefix that was shared, and the one sequence that is left after it, in one store."""
        store = self.usable_store()
        if isinstance(store, SharedPrefix) and store.shape.batch == 1:
            self.start(store.shape, lambda new: new.take_from(store))

    @property
    def shares_copies(self) -> bool:
        """Whether copies of a sequence share its blocks."""
        store, place = self.store, self._place
        if store is None or place is None:
            return False
        return isinstance(store, SharedPrefix) or place.can_be_continued(store, store.num_settled)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that `indices` (integers or a boolean mask) selects, in that order."""
        if self.store is not None:
            self.reorder_cache(torch.arange(self.store.shape.batch)[torch.as_tensor(indices, device="cpu")])

    def buffers(self) -> Iterable[TokenBuffer]:
        """Return all buffers that hold memory for this layer alone."""
        return () if self.store is None else self.store.buffers()

    def usable_store(self) -> AnyStore | None:
        """
        Return the store.

        Raises:
            IncompleteCacheError: something has ended a change of it, or of the cache, half-way.
        """
        if self._stores.attention.products:
            self._stores.attention.compute_kept()
        store = self.store
        if self._stores.unfinished is not None or (store is not None and not store.is_intact):
            raise IncompleteCacheError(
                f"An error or an interruption ended {self._stores.unfinished or f'a change of layer {self.layer_idx}'} "
                "half-way, so what is stored is not whole. Call cache.reset(), or use a new cache."
            )
        return store

    def store_in_place(self) -> Store | SharedPrefix | None:
        """
        Return the store if a kernel may write the next tokens to it and attend to them, see `Store.make_place`.

        Raises:
            IncompleteCacheError: see `usable_store`.
        """
        store, place = self.usable_store(), self._place
        if place is None or not place.on_cpu or self._stores.attention.is_declined:
            return None
        parts = (store.prefix, store.tails) if isinstance(store, SharedPrefix) else (store,)
        if not all(isinstance(part, Store) and part.is_in_host_blocks for part in parts):
            return None
        assert isinstance(store, (Store, SharedPrefix))
        return store

    def still_has(self, store: AnyStore) -> bool:
        """Return whether this is the layer's store."""
        return self.store is store

    def offload(self) -> None:
        """Do nothing: the placement decides where a layer lives."""

    def prefetch(self) -> None:
        """Do nothing: a layer fetches those that follow it."""

    def _truncate(self, store: AnyStore, num_tokens: int) -> None:
        store.truncate(num_tokens)
        if isinstance(store, SharedPrefix) and num_tokens < store.least_tokens:
            self.start(store.shape, lambda new: new.take_from(store))

    def _device_memory_error(self, new_tokens: int, error: torch.OutOfMemoryError) -> DeviceMemoryError:
        assert self.store is not None
        if self._stores.placement.offload:
            advice = "Pass prefill_chunk_size=512 to generate, or cpu_decode=True to the cache"
        else:
            advice = "Use OffloadedHybridCache, which keeps them in host memory, or QuantizedHybridCache(offload=True)"
        return DeviceMemoryError(
            f"The device has no room for {new_tokens:,} more tokens of layer {self.layer_idx}, which holds "
            f"{self.store.num_tokens:,} ({self.store.shape}). {advice}; `hf-hybrid-cache plan` tells what fits. "
            f"The device said: {str(error).splitlines()[0]}"
        )

    def fitting(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return new states that can follow the stored ones, which move to the device of the new ones.

        Types are promoted as by `torch.cat`, which transformers' layers use, unless the query's type would be another.

        Raises:
            ValueError: the states do not fit each other, or the stored ones.
            RuntimeError: the states require gradients.
        """
        store, shape = self.store, KVShape.of(keys, values)
        require_no_gradients(keys, values)
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


def require_no_gradients(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise a `RuntimeError` where states require gradients, which writes in place do not keep."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        raise RuntimeError(
            "This cache writes in place and keeps no gradients, but the new states require them. Run the model under "
            "torch.no_grad() or torch.inference_mode(), or train with transformers' DynamicCache."
        )


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
