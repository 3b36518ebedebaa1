"""The base class of all caches."""

import copy
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from ..attention import outside_of_graphs
from ..cache_argument import CACHE_ARGUMENT
from ..layers import (
    HybridLayer,
    IncompleteCacheError,
    LayerStores,
    Placement,
    Selection,
    batch_of,
    checked_count,
    follow,
    forget_states_of,
    move_tensors_of,
    repeat_sequences_of,
    tensors_of,
)
from ..planning.advice import advice
from ..planning.plans import choose
from ..planning.prediction import Strategy
from ..planning.sizes import parse_bytes
from ..processes import Peers
from ..saving import CacheFile, CacheFileError, first_difference, save_layers, traits_of
from ..scalars import as_integer
from ..storage import (
    CacheStats,
    HostMemoryError,
    InitialCapacity,
    KVCodec,
    KVShape,
    available_host_bytes,
    can_page_lock,
    require_host_bytes,
)
from ..token_ids import TokenIds, as_token_ids
from .callers import border_that_drops_the_cache, length_of_whole_prompt
from .forward_passes import ForwardPasses
from .slow_steps import SlowSteps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _refuse_class() -> NoReturn:
    raise TypeError(
        f"{CACHE_ARGUMENT} is a class of caches, not a cache. Make one with the model's config: "
        f"{CACHE_ARGUMENT}=DynamicHybridCache(model.config)."
    )


def _of_an_instance(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate the first method that models call, so that it refuses a class of caches passed for a cache."""

    @wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not args:
            _refuse_class()
        return method(*args, **kwargs)

    return checked


class _ClassOfCaches(type):
    """A metaclass that refuses a class passed for a cache, at the first property that transformers 5.24 reads."""

    @property
    def is_linear(cls) -> NoReturn:
        _refuse_class()


@dataclass(frozen=True)
class MemoryReport:
    """
    The size of a cache, measured from its buffers.

    Attributes:
        device_bytes: in the memory of accelerators.
        host_bytes: in host memory.
        num_tokens: tokens of each sequence.
    """

    device_bytes: int
    host_bytes: int
    num_tokens: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes held for each token of each sequence's context, wherever they are; 0 for an empty cache."""
        return (self.device_bytes + self.host_bytes) / self.num_tokens if self.num_tokens else 0.0


class HybridCache(DynamicCache, metaclass=_ClassOfCaches):
    """
    A KV cache whose full-attention layers live where `placement` says.

    Layers of other types (sliding window, chunked, linear attention, ...) get transformers' own layer, so that every
    decoder model works. Tokens are the same as with transformers' `DynamicCache`, in every generation mode.

    Args:
        config: the model's config (`model.config`).
        placement: where layers live.
        max_length: tokens that will be stored, if known: memory of an accelerator is then taken once instead of in
            chunks, and host memory that would not suffice for so many is an error at the first token. A hint: more
            tokens still fit.
        codec: how layers are quantized: one for all, or by index in the model; layers that are not named stay in full
            precision. `None` quantizes none.
        group: of processes that run the model in step (`torch.distributed`): each keeps a shard of the blocks in its
            host memory and attends to it there; partial results are merged once a layer.
        selection: lets attention on the CPU skip pages, see `Selection`; `None` to read all.
        offloading: `False`; models that make a cross-attention cache of this class themselves pass it (T5Gemma).

    Raises:
        TypeError: `config` is not a transformers config, or `group` not a process group.
        ValueError: `offloading` is asked for, `max_length` is not an integer of at least 0, there are fewer layers than
            resident ones, memory is to be page-locked without CUDA, `cpu_decode`, `codec` or `selection` names a layer
            that is not one of full attention, with `group` layers are to be elsewhere than in host memory, or there is
            a `selection` and layers are not to be attended to on the CPU, by one process.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        placement: Placement | None = None,
        max_length: int | None = None,
        codec: KVCodec | Mapping[int, KVCodec] | None = None,
        group: "ProcessGroup | None" = None,
        selection: Selection | None = None,
        offloading: bool = False,
    ):
        require_config(config)
        if offloading:
            raise ValueError("offloading=True is of transformers' own caches: use OffloadedHybridCache(config).")
        _require_instance("placement", placement, Placement, "Placement(offload=True)")
        _require_instance("selection", selection, Selection, "Selection(top_p=0.995)")
        for each in codec.values() if isinstance(codec, Mapping) else [codec]:
            _require_instance("codec", each, KVCodec, "minmax(4)")
        if max_length is not None:
            max_length = checked_count("max_length", max_length)
        placement = placement or Placement()
        peers = None if group is None else Peers(group)
        if peers is not None:
            placement = _shared_placement(placement)
        if selection is not None:
            placement = _placement_for_selection(placement, peers)
        accelerator = torch.accelerator.current_accelerator()
        if placement.pin_memory and (accelerator is None or not can_page_lock(accelerator.type)):
            raise ValueError(
                "pin_memory=True needs CUDA, or another accelerator for which torch page-locks memory, which is not "
                "available here. Use pin_memory=None to decide by device."
            )

        text_config = config.get_text_config(decoder=True)
        layers: list[Any] = DynamicCache(config=config).layers
        # For encoder-decoder models with different numbers of layers, transformers makes the encoder's number.
        del layers[getattr(text_config, "num_decoder_layers", None) or len(layers) :]
        ours = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        given = codec if isinstance(codec, Mapping) else dict.fromkeys(ours, codec)
        codecs = {_as_index(index): each for index, each in given.items() if each is not None}
        dense_layers = () if selection is None else selection.dense_layers
        named = {"cpu_decode": placement.cpu_layers, "codec": codecs, "selection": dense_layers}
        for argument, indices in named.items():
            if unknown := sorted(set(indices).difference(ours)):
                raise ValueError(f"{argument} names layers {unknown}; the model's full-attention layers are {ours}.")
        if not ours:
            _warn_of_nothing_to_do(text_config, layers)
        context = getattr(text_config, "max_position_embeddings", None) or 0
        capacity = InitialCapacity.expecting(max_length, context)
        self._model_traits = traits_of(config)
        self._stores = LayerStores(placement, capacity, len(ours), codecs, text_config, peers, selection)
        self._passes = ForwardPasses(layers)
        self._steps = SlowSteps()
        self._first, self._last = (ours[0], ours[-1]) if ours else (-1, -1)
        self._was_asked_half_way = False
        self._was_asked = False
        self._tokens_before = 0
        self._token_ids: torch.Tensor | None = None  # `None` once they are not known
        # Such models have two forms of rotary embedding, one for short and one for long contexts.
        self._may_leave_border = hasattr(text_config, "original_max_position_embeddings")
        self._has_left_border = False
        self._of_images = frozenset(getattr(text_config, "cross_attention_layers", None) or ())
        for ordinal, index in enumerate(ours):
            layers[index] = HybridLayer(index, ordinal, self._stores)
        # Not the parent's, which would build its own layers. It is the parent because transformers asks for it by name.
        Cache.__init__(self, layers=layers)

    @staticmethod
    def for_budget(
        config: PreTrainedConfig,
        context: int,
        gpu_memory: int | str | None = None,
        host_memory: int | str | None = None,
        batch_size: int = 1,
        prefill_chunk_size: int = 512,
    ) -> "HybridCache":
        """
        The cache that `hf-hybrid-cache plan` recommends.

        It loses as little as possible, and is the fastest of those that do, by the speeds that `--calibrate` has
        measured.

        Args:
            config: the model's config (`model.config`).
            context: tokens, prompt and answer.
            gpu_memory: for weights, cache and all, in bytes or as text such as "8GiB"; 0 if the model is on the CPU;
                `None` for what is free now, with the model loaded.
            host_memory: likewise.
            batch_size: sequences at once, beams included.
            prefill_chunk_size: tokens of the prompt per forward pass; pass the same to `generate`.

        Raises:
            TypeError: `config` is not a transformers config.
            ValueError: nothing fits; the message says what is short and which context would fit.

        Example:
            >>> cache = HybridCache.for_budget(model.config, 100_000, gpu_memory="8GiB", host_memory="32GiB")
            >>> model.generate(**inputs, cache=cache, prefill_chunk_size=512)
        """
        require_config(config)
        context = checked_count("context", context)
        batch_size = checked_count("batch_size", batch_size)
        prefill_chunk_size = checked_count("prefill_chunk_size", prefill_chunk_size)
        device_bytes, host_bytes = (
            None if memory is None else parse_bytes(memory) for memory in (gpu_memory, host_memory)
        )
        candidate = choose(config, context, device_bytes, host_bytes, batch_size, prefill_chunk_size)
        cache = HybridCache(config, candidate.placement, codec=candidate.codec)
        if candidate.strategy == Strategy.BOTH:
            reason = f"the fastest of its quality with {context:,} tokens, by the speeds of this machine"
            cache.stats.note_decision(0, "device_tokens", candidate.device_tokens, reason)
            cache.stats.note_decision(0, "cpu_decode", candidate.cpu_fraction, reason)
        return cache

    @outside_of_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Store the states of new tokens of one layer and return those of all tokens, see `HybridLayer.update`.

        Where one sequence is stored, and states of several come, all of them continue it.

        Raises:
            HostMemoryError: host memory would not suffice; the message says what would fit.
            IncompleteCacheError: the forward pass before this one, or `crop`, reached the first layers only.
            ValueError: the cache is for a model with fewer layers.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"The model has a layer {layer_idx} (counted from 0), and the cache was made for {len(self.layers)} "
                "layers. Make it with the config of this model, model.config."
            )
        self._note_access(layer_idx, "keys and values")
        if self._tokens_before and not super().get_seq_length(layer_idx):
            self._require_reached_before(layer_idx)
        if layer_idx in (self._first, self._last) and key_states.shape[2] == 1 and key_states.is_cpu:
            self._note_step(layer_idx, key_states.shape[0])
        layer, batch = self.layers[layer_idx], key_states.shape[0]
        if not isinstance(layer, HybridLayer):
            follow(layer, key_states.device)
        if batch > 1 and (layer.batch if isinstance(layer, HybridLayer) else batch_of(layer)) == 1:
            self.batch_repeat_interleave(batch)
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except HostMemoryError as error:
            num_tokens = super().get_seq_length(layer_idx) + key_states.shape[2]
            shape = KVShape.of(key_states, value_states)
            raise self._advised(error, max(num_tokens, self._stores.capacity.device_tokens), shape) from None

    @outside_of_graphs
    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The states of a layer of linear attention, which some models write to."""
        self._note_access(layer_idx, f"convolution {kwargs.get('state_idx', args)}")
        return super().get_conv_state(layer_idx, *args, **kwargs)

    @outside_of_graphs
    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Store states of a layer of linear attention, as transformers' own cache does."""
        self._note_access(layer_idx, f"new convolution {kwargs.get('state_idx', args)}")
        follow(self.layers[layer_idx], conv_states.device)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @outside_of_graphs
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Store states of a layer of linear attention, as transformers' own cache does."""
        self._note_access(layer_idx, f"recurrence {kwargs.get('state_idx', args)}")
        follow(self.layers[layer_idx], recurrent_states.device)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def save(
        self, path: str | os.PathLike[str], token_ids: TokenIds | None = None, document_tokens: int | None = None
    ) -> None:
        """
        Keep what is stored in a file, a safetensors file with a checksum for each layer.

        It is written beside `path` and takes its place when it is complete; what was there stays until then. States
        that are on a device pass through host memory layer by layer. Where processes keep a share each all of them
        call it, and the first one writes what one process would have written.

        Args:
            path: of the file, in a folder that exists.
            token_ids: of the tokens that are stored, `[batch, tokens]` or a list, to be kept with them: `load` compares
                them with those of a prompt, and `saved_token_ids` returns them.
            document_tokens: how many of them, from the start, are those of a document that a conversation follows.
                `hf-hybrid-cache chat` takes questions back as far as that.

        Raises:
            CacheFileError: the file cannot be written, or a layer of transformers' own, or a codec, cannot be saved.
            ValueError: `token_ids` are not as many as there are tokens, or `document_tokens` are more.
            IncompleteCacheError: something ended a change of the cache half-way.
            LostProcessError: another process ended, or did not call it.

        Example:
            >>> cache = QuantizedHybridCache(model.config, bits=4)
            >>> prefill(model, document_ids, cache)
            >>> cache.save("document.kv", document_ids)
        """
        self._require_finished()
        self._require_whole()
        self._require_all_reached()
        num_tokens = self._num_tokens
        kept = None if token_ids is None else as_token_ids("token_ids", token_ids)
        if kept is not None and kept.shape[1] != num_tokens:
            raise ValueError(
                f"token_ids must be integers [batch, {num_tokens}], one for each token that is stored, got "
                f"{list(kept.shape)}. The last token that was generated is not stored."
            )
        document = None if document_tokens is None else as_integer(document_tokens)
        if document_tokens is not None and (kept is None or document is None or not 0 < document <= num_tokens):
            raise ValueError(
                f"document_tokens must be an integer from 1 to the {num_tokens:,} stored tokens, and goes with "
                f"token_ids, got {document_tokens!r}."
            )
        save_layers(path, self.layers, self._stores, self._model_traits, kept, document)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        placement: Placement | None = None,
        mmap: bool = False,
        device: torch.device | str | None = None,
        token_ids: TokenIds | None = None,
        verify: bool = True,
        dtype: torch.dtype | None = None,
        group: "ProcessGroup | None" = None,
        selection: Selection | None = None,
    ) -> "HybridCache":
        """
        The cache that `save` wrote; `generate` then computes only what comes after the tokens in it.

        Args:
            path: of the file.
            config: of the model that will use it (`model.config`).
            placement: where layers live now; `None` for where they did.
            mmap: let keys and values be those of the file: nothing is read before it is attended to, and memory that
                only holds the file can be had back by the system. For layers that are attended to on the CPU. New
                tokens, and changes, stay in memory. Replace the file while it is in use, as `save` does, but do not
                write to it. Where the system cannot map it (other than Linux) it is read.
            device: of the model; `None` for where it was.
            token_ids: of the prompt that is to follow, `[batch, tokens]` or a list: refused unless it begins with the
                tokens that were saved with the cache.
            verify: compare layers with their checksums, for which all of the file is read. `False` saves that time.
            dtype: of the model's keys and values; `None` for `config.dtype`, as far as that is known. What is stored is
                converted to it where nothing is lost, or where it is asked for here.
            group: processes that keep a share each, as many as there are now: all load the same file, and with
                `verify=False` each reads only its share.
            selection: what attention may leave out, see `HybridCache`; it is not kept in files.

        Raises:
            CacheFileError: it is not the whole and unaltered file of a cache for such a model, or of other tokens than
                `token_ids`; `mmap` is asked for and a layer is not attended to on the CPU; or the model is of a type
                that what is stored cannot be converted to.
            HostMemoryError: host memory would not suffice.

        Example:
            >>> cache = HybridCache.load("document.kv", model.config)
            >>> model.generate(torch.cat([document_ids, question_ids], dim=1), cache=cache)
        """
        require_config(config)
        with CacheFile(path) as file:
            file.require_model(config)
            if token_ids is not None:
                file.require_prefix(as_token_ids("token_ids", token_ids))
            saved, codecs = file.description, file.codecs()
            # Shares are in host memory, wherever the saved cache was.
            saved_placement = saved.placement if group is None else Placement()
            try:
                cache = HybridCache(config, placement or saved_placement, saved.max_length, codecs, group, selection)
            except ValueError as error:
                advice = "Leave out selection=." if selection is not None else "Pass placement=Placement(...)."
                raise CacheFileError(path, f"cannot be loaded: {error} {advice}") from error
            known = config.get_text_config(decoder=True).dtype
            converted_to = file.conversion(dtype, known if isinstance(known, torch.dtype) else None, mmap)
            file.fill(cache.layers, device, mmap, verify)
            cache._token_ids = file.token_ids()
        if converted_to is not None:
            for layer in cache.layers:
                held_on, _ = _whereabouts(layer)
                if held_on is not None:
                    _move(layer, held_on, converted_to)
        return cache

    def __repr__(self) -> str:
        stores = [layer.store for layer in self.layers if isinstance(layer, HybridLayer)]
        if any(store is not None and store.held_bytes for store in stores):
            # To ask for the memory would be to have them quantized.
            return (
                f"{type(self).__name__}({', '.join(self._forms())}; {self._num_tokens:,} tokens, some to be quantized)"
            )
        held = self.memory()
        places = ((held.device_bytes, "on the device"), (held.host_bytes, "in host memory"))
        sizes = (f"{num_bytes / 2**20:.1f} MiB {place}" for num_bytes, place in places if num_bytes)
        content = ", ".join([f"{held.num_tokens:,} tokens", *sizes]) if held.num_tokens else "empty"
        return f"{type(self).__name__}({', '.join(self._forms())}; {content})"

    def __str__(self) -> str:
        """Like `repr`, and how each layer is quantized."""
        by_form: dict[str, list[int]] = {}
        for index, codec in self.codecs.items():
            by_form.setdefault(str(codec), []).append(index)
        lines = (f"  layers {', '.join(map(str, indices))}: {form}" for form, indices in by_form.items())
        return "\n".join([repr(self), *lines])

    def _forms(self) -> Iterator[str]:
        """Yield the number of layers of each kind, and their place."""
        numbers = Counter(
            (codec.keys.bits, codec.values.bits) if codec else None
            for layer in self.layers
            if isinstance(layer, HybridLayer)
            for codec in [self.codecs.get(layer.layer_idx)]
        )
        for bits, number in numbers.items():
            kind = "in full precision" if bits is None else f"of {bits[0]} bits"
            if bits is not None and bits[0] != bits[1]:
                kind = f"of {bits[0]} and {bits[1]} bits"
            yield f"{number} layer{'' if number == 1 else 's'} {kind}"
        if others := len(self.layers) - sum(numbers.values()):
            yield f"{others} of transformers' own"
        if (peers := self._stores.peers) is not None:
            yield f"share {peers.rank + 1} of {peers.size}"
        if self._stores.placement.offload:
            yield "offloaded"
        if device_tokens := self._stores.placement.device_tokens:
            yield f"up to {device_tokens:,} tokens of each on the device"
        if any(isinstance(layer, HybridLayer) and layer.is_attended_on_cpu for layer in self.layers):
            yield "attended to on the CPU"

    @property
    def codecs(self) -> dict[int, KVCodec]:
        """
        The codecs of quantized layers, by index in the model; other layers stay in full precision.

        What a cache chooses by itself (`rotate="auto"`) it chooses once, when it first codes something: `is_fitted`
        tells. It stays through `reset`, and in copies and files. `HybridCache(config, codec=cache.codecs)` is a new
        cache with the same choice.
        """
        return self._stores.codecs

    @property
    def group(self) -> "ProcessGroup | None":
        """The group of processes that keep a share each; `None` where there is one process."""
        return None if self._stores.peers is None else self._stores.peers.group

    @property
    def selection(self) -> Selection | None:
        """The page selection of attention on the CPU; `stats.share_read` tells how much it reads."""
        return self._stores.selection

    @property
    def stats(self) -> CacheStats:
        """Counters of copies between host and device since the cache was built or reset."""
        return self._stores.stats

    def memory(self) -> MemoryReport:
        """Measure the bytes that the cache holds now, layers of transformers' own included."""
        sizes = {"host": 0, "device": 0}
        for device, num_bytes in self._holdings():
            sizes["host" if device.type == "cpu" else "device"] += num_bytes
        return MemoryReport(sizes["device"], sizes["host"], self._num_tokens)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """
        Move what is stored to where a model can use it, layer by layer; where it is already, nothing moves.

        Nothing has to be moved for a model that computes elsewhere now: a layer goes where new states come from. This
        gives memory of a device back before that, or changes the type.

        Args:
            *args: as `torch.Tensor.to` takes them, by position or by name: `device` of the model that will use the
                cache next, `dtype` of its states, both, or another tensor that has them. Layers that live in host
                memory stay there.
            **kwargs: likewise. With `non_blocking=`, `True` or `False`, a device is only announced, and nothing moves
                before states come from there: accelerate's hooks hand every argument of every module to the device of
                the module, and keys and values would go around with them.

        Returns:
            This cache.

        Raises:
            HostMemoryError: host memory would not suffice; everything is where it was then.
            TypeError: `dtype` is not a floating one.
            ValueError: the device is meta, which holds nothing.
        """
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, is_non_blocking, _ = parsed
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"Keys and values are floating-point numbers, and cannot be {dtype}.")
        if dtype is None and (device is None or is_non_blocking or "non_blocking" in kwargs):
            return self
        if device is not None and device.type == "meta":
            raise ValueError("Keys and values cannot be moved to meta, which holds nothing. Use cache.reset().")
        if device is not None:
            device = torch.empty(0, device=device).device  # with its index, as the states of the model have it
        before = [(layer, *_whereabouts(layer)) for layer in self.layers]
        try:
            for layer, held_on, _ in before:
                if held_on is not None:
                    _move(layer, device or held_on, dtype)
        except BaseException as error:
            for layer, old_device, old_dtype in before:
                if old_device is not None:
                    _move(layer, old_device, old_dtype)
            if isinstance(error, HostMemoryError):
                changes: dict[str, Any] = {} if dtype is None else {"key_dtype": dtype, "value_dtype": dtype}
                if device is not None:
                    changes["device"] = device
                raise self._advised(error, self._num_tokens, **changes) from None
            raise
        return self

    @outside_of_graphs
    @_of_an_instance
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """
        Tokens of each sequence that are stored, by the first layer of attention or another one.

        Within a forward pass these differ, and some models ask there. A pass that begins while they differ is refused
        with `IncompleteCacheError`.

        Raises:
            ValueError: `generate` is about to continue what is stored with a prompt that is not longer.
        """
        first, last = self._lengths_of_ends()
        self._was_asked = True
        self._was_asked_half_way = first != last or self._passes.is_unfinished
        if first:
            prompt = length_of_whole_prompt("_prefill")
            if prompt is not None and prompt <= first:
                self._require_finished()
                self._require_all_reached()
                raise self._nothing_to_compute(f"the prompt of {prompt:,} tokens")
        if self._may_leave_border:
            self._warn_if_dropped(first)
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """
        Prepare for tokens that are taken back, in layers that cannot do so otherwise.

        Raises:
            ValueError: assisted decoding is about to compute the whole prompt, with some tokens stored already.
        """
        if self._num_tokens and length_of_whole_prompt("_assisted_decoding") is not None:
            raise ValueError(
                "Assisted decoding and prompt lookup compute the whole prompt, and the cache holds "
                f"{self._num_tokens:,} tokens already: those of the prompt would be in it twice. Use a new cache, or "
                "generate without an assistant and prompt_lookup_num_tokens."
            )
        super().activate_past_recording()

    @outside_of_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """
        Length and offset of the keys that a mask must cover when `query_length` tokens come next.

        Raises:
            ValueError: there are none.
            IncompleteCacheError: the forward pass before this one, or `crop`, reached the first layers only.
        """
        self._was_asked = True
        if query_length == 0 or self._passes.begins_with(layer_idx):
            self._require_finished()
        if query_length == 0:
            raise self._nothing_to_compute("the prompt")
        return super().get_mask_sizes(query_length, layer_idx)

    def drop_unfinished(self) -> None:
        """
        Forget tokens that not all layers hold, because something ended a forward pass, or `crop`, half-way.

        In a quantized cache, tokens that were quantized meanwhile stay as their codes have them.

        Raises:
            IncompleteCacheError: layers of transformers' own took part, which cannot go back: call `reset`.
        """
        kept, longer = sorted(self._lengths_of_ends())
        may_lack_layers = self._may_lack_layers()
        if kept == longer and not may_lack_layers and not self._passes.is_unfinished:
            return
        if kept == 0 or may_lack_layers:
            self.reset()
            return
        theirs = [layer for layer in self.layers if not isinstance(layer, HybridLayer) and list(tensors_of(layer))]
        if others := {type(layer).__name__ for layer in theirs}:
            raise IncompleteCacheError(
                f"An error or an interruption ended a forward pass half-way, and layers of type "
                f"{', '.join(sorted(others))} cannot go back. Call cache.reset(), or use a new cache."
            )
        for layer in self.layers:
            if isinstance(layer, HybridLayer) and layer.get_seq_length() == longer:
                layer.crop(kept - longer)

    def reset(self) -> None:
        """Forget all tokens and give their memory back; the cache can be used again."""
        super().reset()
        for layer in self.layers:
            forget_states_of(layer)
        self._stores.unfinished = None
        if self._stores.cpu_fraction is not None:
            self._stores.cpu_fraction.reset()
        self._passes.reset()
        self._was_asked_half_way = False
        self._tokens_before = 0
        self._token_ids = None
        self.stats.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each sequence, or all if there are not that many."""
        super().crop(tokens_to_remove)
        if self._token_ids is not None:
            self._token_ids = self._token_ids[:, : self._num_tokens]

    def require_prefix(self, token_ids: torch.Tensor) -> None:
        """
        Check that a prompt begins with the tokens that are stored, as far as it is known which these are.

        They are known after `load` of a file that has them, and after `note_tokens`.

        Args:
            token_ids: of the whole prompt, `[batch, tokens]`.

        Raises:
            ValueError: it begins with others.
        """
        if self._token_ids is None:
            return
        known, given = self._token_ids[:, : self._num_tokens], token_ids.to("cpu", torch.long)
        known = known[:, : given.shape[1]]
        if known.shape[0] == 1:
            known = known.expand(given.shape[0], -1)
        if given.shape[0] != known.shape[0]:
            return  # another batch, which the layers refuse
        different = first_difference(known, given[:, : known.shape[1]])
        if different is not None:
            sequence, position = different
            raise ValueError(
                f"The prompt does not go on with the {self._num_tokens:,} tokens that the cache holds: token "
                f"{position:,} of sequence {sequence} is {int(given[sequence, position])}, and the cache holds "
                f"{int(known[sequence, position])} there (counted from 0). Pass the whole conversation as the prompt, "
                "or use a new cache, or cache.reset()."
            )

    def note_tokens(self, token_ids: torch.Tensor | None) -> None:
        """
        Note which tokens a generation with this cache has computed, for `require_prefix`.

        Warns if the model has not used the cache at all.

        Args:
            token_ids: prompt and answer, `[batch, tokens]`; `None` if it is not known any more what is stored.
        """
        self._token_ids = None if token_ids is None else token_ids.detach().to("cpu", torch.long)
        if not self._num_tokens and self._may_be_unused:
            warnings.warn(
                "The model has not used the cache that it was passed, which is empty: it keeps none, or one of its "
                "own.",
                stacklevel=_stack_level(),
            )

    @property
    def _may_be_unused(self) -> bool:
        """Whether an empty cache is one that was not used: some layer counts tokens, and nothing was said already."""
        return any(isinstance(layer, CacheLayerMixin) for layer in self.layers) and not self._has_left_border

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence `i` what sequence `beam_idx[i]` was."""
        with self._changing_all("reorder_cache"):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that `indices` (integers or a boolean mask) selects, in that order."""
        with self._changing_all("batch_select_indices"):
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """
        Repeat every sequence `repeats` times, side by side.

        Where layers are attended to on the CPU, or are in full precision, the copies share all whole blocks of 64
        tokens: these are stored once, and a decode step reads them once. docs/continuations.md says what is copied.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
        """
        known = self._token_ids
        if repeats > 1:
            copied = f"{repeats} copies of {self._num_tokens:,} tokens need"
            self._require_room_for_copies(repeats, copied, are_shared=True)
        with self._changing_all("batch_repeat_interleave"):
            for layer in self.layers:
                repeat_sequences_of(layer, repeats)
        self._token_ids = None if known is None else known.repeat_interleave(repeats, dim=0)

    @contextmanager
    def _changing_all(self, operation: str) -> Iterator[None]:
        """Mark the cache as not whole if an operation on all layers is interrupted after it has changed some."""
        self._token_ids = None
        before = self._versions()
        try:
            yield
        except BaseException:
            if self._versions() != before:
                self._stores.unfinished = operation
            raise

    def _versions(self) -> list[object]:
        """Return values that differ if something has changed; layers of transformers' own always do."""
        return [
            (layer.store and layer.store.version) if isinstance(layer, HybridLayer) else object()
            for layer in self.layers
        ]

    @property
    def _num_tokens(self) -> int:
        """Tokens in the first layer of attention, also while others hold more or less; 0 without one."""
        return self._lengths_of_ends()[0]

    def _lengths_of_ends(self) -> tuple[int, int]:
        """
        Tokens in the first and the last layer of attention, which differ if something did not reach all layers.

        The last one is the last that holds any: models may have fewer layers than their config says.
        """
        lengths = (layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin))
        first = next(lengths, 0)
        for index in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[index]
            if index not in self._of_images and isinstance(layer, CacheLayerMixin):
                length = layer.get_seq_length()
                if length:
                    return first, length
        return first, 0

    def _may_lack_layers(self) -> bool:
        """
        Whether the last layers of attention hold nothing, and only one forward pass has ended before them.

        Something may have ended it half-way. A model that has fewer layers than its config says ends all of them there.
        """
        if self._passes.have_ended_alike or not self._num_tokens:
            return False
        *_, last = (
            layer
            for index, layer in enumerate(self.layers)
            if index not in self._of_images and isinstance(layer, CacheLayerMixin)
        )
        return last.get_seq_length() == 0

    def _require_all_reached(self) -> None:
        if self._may_lack_layers():
            raise IncompleteCacheError(
                "The last layers hold nothing: something ended a forward pass half-way, or the model has fewer layers "
                f"than the {len(self.layers)} of its config. Call cache.reset(), or make the cache with a config that "
                "has the number of layers in num_hidden_layers."
            )

    def _note_access(self, layer_idx: int, access: str) -> None:
        """Note that a forward pass comes to a layer; if it is another pass, the length it was told must be true."""
        if self._passes.begins_with(layer_idx, access):
            if self._was_asked_half_way:
                self._require_finished()
            self._stores.recently_lent.take_edits()
            # A forward pass asks for the length before its first layer; code that fills a cache by layers does not.
            self._tokens_before = self._num_tokens if self._was_asked else 0
            self._was_asked = False
        self._was_asked_half_way = False
        self._passes.note_access(layer_idx, access)

    def _note_step(self, layer_idx: int, batch: int) -> None:
        """Note that a decode step on the CPU comes to the first or the last of our layers."""
        if layer_idx == self._first:
            self._steps.begin(super().get_seq_length(layer_idx), batch)
        else:
            self._steps.end()

    def _nothing_to_compute(self, prompt: str) -> ValueError:
        return ValueError(
            f"There are no tokens to compute: {prompt} is not longer than the {self._num_tokens:,} tokens that the "
            "cache holds already. A cache goes on with the text that is in it: pass the whole conversation as the "
            "prompt, or for another text use a new cache, or cache.reset()."
        )

    def _warn_if_dropped(self, num_tokens: int) -> None:
        border = border_that_drops_the_cache(num_tokens)
        if border is None:
            return
        self._may_leave_border, self._has_left_border = False, True
        warnings.warn(
            f"The model goes on without this cache, which stays at {num_tokens:,} tokens: beyond {border:,} tokens its "
            "rotary embedding is another one, and transformers computes all tokens again, into a DynamicCache of its "
            f"own. Keep prompt and answer within {border:,} tokens, or fill the cache beyond them in one call of the "
            f"model before generate: model(ids, {CACHE_ARGUMENT}=cache, logits_to_keep=1).",
            stacklevel=2,
        )

    def _require_reached_before(self, layer_idx: int) -> None:
        """Raise an error, because a layer without tokens was not reached by earlier passes, unless it stores images."""
        if layer_idx in self._of_images:
            return
        self._passes.note_difference()
        raise IncompleteCacheError(
            f"An error or an interruption ended an earlier forward pass half-way: layer {layer_idx} holds nothing, and "
            f"those before it hold {self._tokens_before:,} tokens. Call cache.reset(), or use a new cache."
        )

    def _require_finished(self) -> None:
        if self._passes.is_unfinished:
            raise IncompleteCacheError(
                "An error or an interruption ended a forward pass half-way: not all layers of linear attention have "
                "seen its tokens, and they cannot go back to what they held. Call cache.reset(), or use a new cache."
            )
        first, last = self._lengths_of_ends()
        if first != last:
            lengths = [layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)]
            index = next(index for index, length in enumerate(lengths) if length != first)
            raise IncompleteCacheError(
                f"An error or an interruption ended a forward pass, or crop, half-way: the first {index} layers of "
                f"attention hold {first:,} tokens, the last one {last:,}. Call cache.drop_unfinished() to go "
                "back to what all of them hold, or cache.reset()."
            )

    def __deepcopy__(self, memo: dict) -> "HybridCache":
        self._require_whole()
        self._require_room_for_copies(2, f"A copy of {self._num_tokens:,} tokens needs")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._stores.config)] = self._stores.config  # the model's: its attention may be set to another one
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled, or copied without what it holds: use cache.save(path) and "
            "HybridCache.load(path, model.config) to keep it, copy.deepcopy(cache) for a copy."
        )

    def _require_whole(self) -> None:
        for layer in self.layers:
            if isinstance(layer, HybridLayer):
                layer.require_whole()

    def _require_room_for_copies(self, number: int, purpose: str, are_shared: bool = False) -> None:
        """
        Check that what is held fits `number` times, and one buffer once more while it is exchanged.

        With `are_shared` layers need none for what copies share.
        """
        alone = [layer for layer in self.layers if not (are_shared and _shares_copies(layer))]
        sizes = [num_bytes for device, num_bytes in self._holdings(alone) if device.type == "cpu"]
        try:
            require_host_bytes((number - 1) * sum(sizes) + max(sizes, default=0), purpose)
        except HostMemoryError as error:
            batch = number * next(self._shapes()).batch
            raise self._advised(error, self._num_tokens, batch=batch) from None

    def _shapes(self) -> Iterator[KVShape]:
        """Yield the shapes of the states in our layers that hold some."""
        for layer in self.layers:
            if isinstance(layer, HybridLayer) and layer.store is not None:
                yield layer.store.shape

    def _advised(
        self, error: HostMemoryError, num_tokens: int, shape: KVShape | None = None, **changes: Any
    ) -> HostMemoryError:
        """
        Return the error with advice on caches that would fit.

        Args:
            error: what it says so far.
            num_tokens: that do not fit.
            shape: of the states of layers that hold none yet; `None` for that of another layer.
            **changes: of the shapes, that made it too much.
        """
        if (peers := self._stores.peers) is not None:
            return HostMemoryError(
                f"{error} These are of one of {peers.size} shares: more processes, or fewer bits, make it smaller."
            )
        stores, layers = self._stores, [layer for layer in self.layers if isinstance(layer, HybridLayer)]
        shape = shape or next(self._shapes())
        shapes = {
            layer.layer_idx: (shape if layer.store is None else layer.store.shape)._replace(**changes)
            for layer in layers
        }
        placement = stores.placement
        if stores.attention.is_declined:
            placement = replace(placement, cpu_decode=False)
        held = 0 if changes else min(layer.get_seq_length() for layer in layers)
        host_bytes = available_host_bytes() + self.memory().host_bytes
        return HostMemoryError(
            f"{error} {advice(placement, stores.codecs, shapes, num_tokens, held, host_bytes)}".rstrip()
        )

    def _holdings(self, layers: Iterable[Any] | None = None) -> Iterable[tuple[torch.device, int]]:
        """Bytes of the buffers of all layers, or of some, and of what layers share, each on its device."""
        for staging in self._stores.stagings.values():
            for slot in staging.slots:
                yield from ((buffer.device, buffer.num_bytes) for buffer in (slot.keys, slot.values))
        for device, scratch in self._stores.scratches.items():
            yield device, scratch.num_bytes
        for layer in self.layers if layers is None else layers:
            if not isinstance(layer, HybridLayer):
                yield from ((tensor.device, tensor.nbytes) for tensor in tensors_of(layer))
            else:
                yield from ((buffer.device, buffer.num_bytes) for buffer in layer.buffers())


def _shares_copies(layer: Any) -> bool:
    return isinstance(layer, HybridLayer) and layer.shares_copies


def _as_index(given: Any) -> Any:
    """Return the index of a layer as a Python integer, or the value as it is if it is no integer."""
    index = as_integer(given)
    return given if index is None else index


def require_config(config: object) -> None:
    if isinstance(config, Iterator):
        raise TypeError(
            "torch.nn.DataParallel makes one cache of those of its replicas, which is not possible here. Use one "
            "process for each device (torch.nn.parallel.DistributedDataParallel) with a cache of its own, or "
            "use_cache=False."
        )
    if not isinstance(config, PreTrainedConfig):
        given = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config must be a transformers config such as model.config, got {given}.")


def _shared_placement(placement: Placement) -> Placement:
    """Return the placement of a share, in host memory with attention on the CPU."""
    if placement.offload or placement.device_tokens or placement.cpu_decode not in (None, True):
        raise ValueError(
            "With group= all layers are kept in host memory and attended to there: leave out offload, device_tokens, "
            "and cpu_decode unless it is True."
        )
    return replace(placement, cpu_decode=True)


def _placement_for_selection(placement: Placement, peers: Peers | None) -> Placement:
    """Return the placement for page selection, with attention on the CPU."""
    if peers is not None:
        raise ValueError("selection= and group= cannot be used together: each process reads all of its share.")
    if placement.cpu_decode is False:
        raise ValueError("selection= is for attention on the CPU: leave out cpu_decode=False.")
    if placement.cpu_fraction is not None:
        raise ValueError(
            "selection= is for attention on the CPU to all tokens in host memory, and with a share some are streamed: "
            "use cpu_decode=True."
        )
    return placement if placement.cpu_decode else replace(placement, cpu_decode=True)


def _require_instance(argument: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{argument} must be a {kind.__name__} such as {example}, or None, got {given}.")


def _warn_of_nothing_to_do(config: PreTrainedConfig, layers: Iterable[object]) -> None:
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
    window = getattr(config, "sliding_window", None)
    reason = f" (a sliding window of {window:,} tokens)" if isinstance(window, int) else ""
    warnings.warn(
        f"No layer of this model attends to its whole context{reason}: its layers are transformers' own ({kinds}), and "
        "this cache changes nothing. They hold little; transformers' DynamicCache does the same.",
        stacklevel=_stack_level(),
    )


def _stack_level() -> int:
    """Return the `stacklevel` of the code that called a cache's class."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ or ""):
        level, frame = level + 1, frame.f_back
    return level


def _whereabouts(layer: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return device and dtype of a layer's states; `None` for an empty layer."""
    if isinstance(layer, HybridLayer):
        return (layer.store.shape.device, layer.store.shape.key_dtype) if layer.store is not None else (None, None)
    floating = [tensor for tensor in tensors_of(layer) if tensor.is_floating_point()]
    return (floating[0].device, floating[0].dtype) if floating else (None, None)


def _move(layer: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    if isinstance(layer, HybridLayer):
        layer.to(device, dtype)
    else:
        move_tensors_of(layer, device, dtype)
