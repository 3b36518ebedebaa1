"""One full-attention layer of a hybrid cache."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..attention import CodeAttention, KeyIndex, handles_of, observed
from ..storage import CodedStore, KVShape, KVStore, SplitStore, StreamedStore, TokenBuffer
from .errors import DeviceMemoryError, IncompleteCacheError
from .layer_stores import LayerStores

# Assisted decoding checks up to so many at once.
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
        store: what the layer holds; `None` before the first states.
        is_attended_on_cpu: whether the store is one for attention on the CPU.
        is_attended_in_codes: whether a kernel attends to its coded blocks on the device of the model.
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
        self._code_attention = CodeAttention()
        self.is_attended_on_cpu = self.is_attended_in_codes = False
        self.store: KVStore | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store is not None

    @property
    def device(self) -> torch.device:
        """Of the states that come and are returned; as in transformers' layer there is none before the first."""
        return self._states_shape().device

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys, likewise."""
        return self._states_shape().key_dtype

    def _states_shape(self) -> KVShape:
        if self.store is None:
            raise AttributeError(f"Layer {self.layer_idx} has no device and no dtype before its first states.")
        return self.store.shape

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
            while tokens are removed. Handles (`handles.py`) where they are attended to as they are stored: to be used
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
        key_states, value_states = self._fitting(key_states, value_states)
        self._stores.note_pass(self._ordinal)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        needs_states = self._stores.needs_states
        if self.is_attended_on_cpu and needs_states:
            self._stores.attention.decline()
        if self.is_attended_on_cpu and self._stores.attention.is_declined:
            self._move(self.store.shape)
        store = self.store
        watched = store if store.wants_queries else None
        if watched is not None:
            self._stores.note_holding(watched)
        are_few = key_states.shape[2] <= _FEW_TOKENS
        as_handles = not needs_states and store.num_tokens > 0
        if as_handles and self.is_attended_on_cpu and (are_few or not _is_streamed(store)):
            self._store_for_cpu(store, key_states, value_states)
            return handles_of(store, self._stores.attention, self._selection)
        try:
            if as_handles and are_few and self._is_attended_in_parts(store, key_states.shape[2]):
                assert isinstance(store, SplitStore)
                store.stage(key_states, value_states)
                return handles_of(store, self._stores.attention)
            if as_handles and are_few and self.is_attended_in_codes and not self._code_attention.is_declined:
                assert isinstance(store, CodedStore)
                store.stage(key_states, value_states)
                return handles_of(store, self._code_attention)
            keys, values = store.append(key_states, value_states)
            return (keys if watched is None or needs_states else observed(keys, watched.observe)), values
        except torch.OutOfMemoryError as error:
            raise self._device_memory_error(key_states.shape[2], error) from error

    def _store_for_cpu(self, store: KVStore, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new states for attention on the CPU, to all or to a part of what is in host memory."""
        if isinstance(store, SplitStore) and store.is_shared_out and not store.fits_on_device(keys.shape[2]):
            held = store.num_tokens
            try:
                store.stage(keys, values)
                return
            except torch.OutOfMemoryError:
                if store.num_tokens != held or not store.is_intact or store.cpu_share is None:
                    raise
                store.cpu_share.give_up_streaming(held)
        store.extend(keys, values)

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
            kept = max(0, store.num_tokens + tokens_to_remove)
            if self._selection is not None:
                self._selection.index.truncate(store.tokens_on_host(kept) if isinstance(store, SplitStore) else kept)
            store.truncate(kept)

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
        if self._selection is not None:
            self._selection.reset()
        self._code_attention.reset()

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

    def buffers(self) -> Iterable[TokenBuffer]:
        """Everything that holds memory for this layer alone."""
        index = () if self._selection is None else self._selection.index.buffers()
        return *(() if self.store is None else self.store.buffers()), *index

    @property
    def index(self) -> KeyIndex | None:
        """The index by which attention chooses what to read; `None` if it reads all."""
        if self._selection is None or self._selection.reads_all or not self.is_attended_on_cpu:
            return None
        return self._selection.index

    @property
    def always_chooses(self) -> bool:
        """Whether attention of few queries reads a part, however large it is."""
        return self.index is not None and self._selection is not None and self._selection.most == 1

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
        if self._selection is not None:
            self._selection.reset()
        old.close()

    def _make_store(self, shape: KVShape) -> tuple[KVStore, bool]:
        """A store, and whether it is attended to on the CPU."""
        on_cpu = self._stores.attends_on_cpu(self.layer_idx, self._ordinal, shape)
        if on_cpu:
            assert shape.element is not None
            is_coded, is_selected = self._stores.is_coded(self.layer_idx), self._selection is not None
            self._stores.attention.prepare(shape.element, is_coded, is_selected)
        return self._stores.make(self.layer_idx, self._ordinal, shape), on_cpu

    def _adopt(self, store: KVStore, is_attended_on_cpu: bool) -> None:
        is_attended_in_codes = self._stores.attends_in_codes(self.layer_idx, self._ordinal, store.shape)
        # Nothing is called between these, so that no interruption comes between them.
        self.store = store
        self.is_attended_on_cpu = is_attended_on_cpu
        self.is_attended_in_codes = is_attended_in_codes

    def _usable_store(self) -> KVStore | None:
        """The store, if it is whole."""
        store = self.store
        if self._stores.unfinished is not None or (store is not None and not store.is_intact):
            raise IncompleteCacheError(
                f"An error or an interruption ended {self._stores.unfinished or f'a change of layer {self.layer_idx}'} "
                "half-way, so what is stored is not whole. Call cache.reset(), or use a new cache."
            )
        return store

    def _is_attended_in_parts(self, store: KVStore, new_tokens: int) -> bool:
        """Whether the device attends to its tokens, and to those of host memory where they are streamed to."""
        if not isinstance(store, SplitStore) or self.is_attended_on_cpu or self._stores.attention.is_declined:
            return False
        return not store.fits_on_device(new_tokens)

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
            with nullcontext() if self._selection is None else self._selection.index.following(indices):
                store.select_batch(indices)

    def _fitting(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        New states as they can follow those that are stored, which go to where the new ones are.

        Types are made one as by `torch.cat`, which transformers' layers use, unless the query's type would be another.
        """
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
        store, shape = self.store, KVShape.of(keys, values)
        if store is None or shape == store.shape:
            return keys, values
        if store.num_tokens == 0:
            self.reset()
            return keys, values
        common = shape.promoted_with(store.shape)
        fits = common == store.shape._replace(
            device=common.device, key_dtype=common.key_dtype, value_dtype=common.value_dtype
        )
        # Under autocast attention converts what it is given.
        if not fits or (common != shape and not torch.is_autocast_enabled(shape.device.type)):
            raise ValueError(
                f"Layer {self.layer_idx} holds {store.num_tokens:,} tokens of {store.shape}; the new states are "
                f"{shape}. Use a new cache or cache.reset() for other inputs, or change this one's batch with "
                "batch_repeat_interleave or batch_select_indices, its type with cache.to(dtype)."
            )
        if common != store.shape:
            self._move(common)
        return keys.to(common.key_dtype), values.to(common.value_dtype)


def _is_streamed(store: KVStore) -> bool:
    """Whether there is an accelerator, which is the better place for attention of many tokens."""
    if isinstance(store, SplitStore):
        store = store.host
    return isinstance(store.records if isinstance(store, CodedStore) else store, StreamedStore)
