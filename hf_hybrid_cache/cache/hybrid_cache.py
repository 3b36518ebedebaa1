"""The base class of all caches."""

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..codecs import is_form_of
from ..files import CacheFile, CacheFileError
from ..graph_breaks import outside_of_graphs
from ..layers import HybridLayer, Placement, Selection, batch_of, follow
from ..processes import Peers
from ..storage import CacheStats, HostMemoryError, KVCodec, KVShape
from ..token_ids import TokenIds
from .changes.going_back import GoingBack
from .changes.moving import move
from .changes.sequences import ChangingSequences
from .checks.forward_passes import ForwardPasses
from .checks.image_positions import ImagePositions
from .checks.prompts import Prompts
from .checks.slow_steps import SlowSteps
from .construction import ClassOfCaches, new_contents, of_an_instance, require_config
from .contents.contents import Contents
from .contents.memory import MemoryReport, advised, measured, require_room_for_copies
from .contents.printing import in_lines, in_one_line
from .files import conversion, opened_for, save, traits_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HybridCache(GoingBack, ChangingSequences, metaclass=ClassOfCaches):
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
        peers = None if group is None else Peers(group)
        self._contents = new_contents(config, placement, max_length, codec, peers, selection)
        self._stores, ours = self._contents.stores, self._contents.ours
        self._first, self._last = (ours[0].layer_idx, ours[-1].layer_idx) if ours else (-1, -1)
        self._model_traits = traits_of(config)
        self._passes = ForwardPasses(self._contents)
        self._prompts = Prompts(self._contents, self._passes)
        self._image_positions = ImagePositions()
        self._steps = SlowSteps()
        # Not the parent's, which would build its own layers. It is the parent because transformers asks for it by name.
        Cache.__init__(self, layers=self._contents.layers)

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
        self._passes.note_access(layer_idx, "keys and values")
        layer, batch, num_tokens = self.layers[layer_idx], key_states.shape[0], super().get_seq_length(layer_idx)
        self._passes.require_reached(layer_idx, num_tokens)
        if layer_idx in (self._first, self._last) and key_states.shape[2] == 1 and key_states.is_cpu:
            if layer_idx == self._first:
                self._steps.begin(num_tokens, batch)
            else:
                self._steps.end()
        if not isinstance(layer, HybridLayer):
            follow(layer, key_states.device)
        if batch > 1 and (layer.batch if isinstance(layer, HybridLayer) else batch_of(layer)) == 1:
            if isinstance(layer, HybridLayer):  # before any layer is changed for them
                layer.fitting(key_states[:1], value_states[:1])
            self.batch_repeat_interleave(batch)
        try:
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except HostMemoryError as error:
            wanted = max(num_tokens + key_states.shape[2], self._stores.capacity.device_tokens)
            raise advised(error, self._contents, wanted, KVShape.of(key_states, value_states)) from None
        if self._prompts.asked is not None:
            self._prompts.note_stored()
        if self._image_positions.has_asked is not None:
            self._image_positions.note_stored()
        return states

    @outside_of_graphs
    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The states of a layer of linear attention, which some models write to."""
        self._passes.note_access(layer_idx, f"convolution {kwargs.get('state_idx', args)}")
        return super().get_conv_state(layer_idx, *args, **kwargs)

    @outside_of_graphs
    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Store states of a layer of linear attention, as transformers' own cache does."""
        self._passes.note_access(layer_idx, f"new convolution {kwargs.get('state_idx', args)}")
        follow(self.layers[layer_idx], conv_states.device)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @outside_of_graphs
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Store states of a layer of linear attention, as transformers' own cache does."""
        self._passes.note_access(layer_idx, f"recurrence {kwargs.get('state_idx', args)}")
        follow(self.layers[layer_idx], recurrent_states.device)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def save(
        self, path: str | os.PathLike[str], token_ids: TokenIds | None = None, document_tokens: int | None = None
    ) -> None:
        """
        Keep what is stored in a file, a safetensors file with a checksum for each layer.

        It is written beside `path` and takes its place when it is complete; what was there stays until then. A link
        stays, and so do the permissions of a file that is replaced; a device or a pipe is refused. States that are on a
        device pass through host memory layer by layer. Where processes keep a shard each all of them call it, and the
        first one writes the whole file. It is that of one process, but for sequences that were repeated: one process
        may share their first blocks, and writes these once; a group copies them.

        Args:
            path: of the file, in a folder that exists.
            token_ids: of the tokens that are stored, `[batch, tokens]` or a list, to be kept with them: `load` compares
                them with those of a prompt, and `saved_token_ids` returns them.
            document_tokens: how many of them, from the start, are those of a document that a conversation follows.
                `hf-hybrid-cache chat` takes questions back as far as that.

        Raises:
            CacheFileError: the file cannot be written, or a layer of transformers' own, or a codec, cannot be saved, or
                the model keeps an offset of positions after images itself, as Qwen2-VL does.
            ValueError: `token_ids` are not as many as there are tokens, or `document_tokens` are more.
            IncompleteCacheError: something ended a change of the cache half-way.
            LostProcessError: another process ended, or did not call it.

        Example:
            >>> cache = QuantizedHybridCache(model.config, bits=4)
            >>> prefill(model, document_ids, cache)
            >>> cache.save("document.kv", document_ids)
        """
        self._passes.require_complete()
        self._contents.require_whole()
        self._image_positions.refuse_file(path)
        save(self._contents, self._model_traits, path, token_ids, document_tokens)

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
        with opened_for(config, path, token_ids) as file:
            saved = file.description
            # Shares are in host memory, wherever the saved cache was.
            placement = placement or (saved.placement if group is None else Placement())
            try:
                cache = HybridCache(config, placement, saved.max_length, file.codecs, group, selection)
            except ValueError as error:
                advice = "Leave out selection=." if selection is not None else "Pass placement=Placement(...)."
                raise CacheFileError(path, f"cannot be loaded: {error} {advice}") from error
            known = config.get_text_config(decoder=True).dtype
            converted_to = conversion(file, dtype, known if isinstance(known, torch.dtype) else None, mmap)
            cache._take(file, converted_to, device, mmap, verify)
        return cache

    def _take(
        self,
        file: CacheFile,
        converted_to: torch.dtype | None,
        device: torch.device | str | None,
        mmap: bool = False,
        verify: bool = True,
    ) -> None:
        """Put what a file holds into this empty cache, which has its codecs; see `load` for the errors."""
        file.fill(self.layers, device, mmap, verify)
        self._stores.take_seen_queries(file.seen_queries)
        self._stores.sees_as_alone = file.description.sees_as_alone
        self._prompts.token_ids = file.token_ids
        if converted_to is not None:
            self.to(converted_to)

    def __repr__(self) -> str:
        return in_one_line(type(self).__name__, self._contents)

    def __str__(self) -> str:
        """Like `repr`, and how each layer is quantized."""
        return in_lines(type(self).__name__, self._contents)

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
    def asked_codecs(self) -> dict[int, KVCodec]:
        """The codecs of quantized layers as this cache was made with them, by index in the model."""
        return self._stores.asked_codecs

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
        """Measure the bytes that the cache holds now, layers of transformers' own and checkpoints included."""
        return measured(self._contents)

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
        move(self._contents, *args, **kwargs)
        return self

    @outside_of_graphs
    @of_an_instance
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """
        Tokens of each sequence that are stored, by the first layer of attention or another one.

        Within a forward pass these differ, and some models ask there. A pass that begins while they differ is refused
        with `IncompleteCacheError`.

        Raises:
            ValueError: `generate` is about to continue what is stored with a prompt that is not longer, or begins with
                other tokens, as far as it is known which are stored.
        """
        self._prompts.check(self._passes.note_question())
        self._image_positions.note_question()
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """
        Prepare for tokens that are taken back, in layers that cannot do so otherwise.

        Raises:
            ValueError: assisted decoding is about to compute the whole prompt, with some tokens stored already.
        """
        self._prompts.refuse_assistant()
        super().activate_past_recording()

    @outside_of_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """
        Length and offset of the keys that a mask must cover when `query_length` tokens come next.

        Raises:
            ValueError: there are none.
            IncompleteCacheError: the forward pass before this one, or `crop`, reached the first layers only.
        """
        self._passes.note_mask(query_length, layer_idx)
        if query_length == 0:
            self._prompts.refuse("the prompt")
        return super().get_mask_sizes(query_length, layer_idx)

    def drop_unfinished(self) -> None:
        """
        Forget tokens that not all layers hold, because something ended a forward pass, or `crop`, half-way.

        In a quantized cache, tokens that were quantized meanwhile stay as their codes have them.

        Raises:
            IncompleteCacheError: layers of transformers' own took part, which cannot go back: call `reset`.
        """
        if not self._passes.take_back():
            self.reset()
        self._prompts.keep_stored()

    def reset(self) -> None:
        """Forget all tokens and checkpoints and give their memory back; the cache can be used again."""
        self._contents.checkpoints.drop_after(0)  # first: after an interruption other tokens may come
        super().reset()
        self._contents.forget()
        self._passes.reset()
        self._prompts.token_ids = None
        self._image_positions.reset()
        self.stats.clear()

    def require_prefix(self, token_ids: torch.Tensor) -> None:
        """
        Check that a prompt begins with the tokens that are stored, as far as it is known which these are.

        They are known after `prefill`, after `load` of a file that has them, after `note_tokens`, and of the prompts of
        `generate` that began with an empty cache, or continued known tokens. `generate` checks them once a call. Of an
        answer it is known which tokens it has once a prompt contains it.

        Args:
            token_ids: of the whole prompt, `[batch, tokens]`.

        Raises:
            ValueError: it begins with others.
        """
        self._prompts.require_prefix(token_ids)

    def note_tokens(self, token_ids: torch.Tensor | None) -> None:
        """
        Note which tokens a generation with this cache has computed, for `require_prefix`.

        Warns if the model has not used the cache at all.

        Args:
            token_ids: prompt and answer, `[batch, tokens]`; `None` if it is not known any more what is stored.
        """
        self._prompts.note_tokens(token_ids)

    def __deepcopy__(self, memo: dict) -> "HybridCache":
        self._contents.require_whole()
        require_room_for_copies(self._contents, 2, f"A copy of {self._contents.num_tokens:,} tokens needs")
        memo[id(self)] = twin = type(self).__new__(type(self))
        memo[id(self._stores.config)] = self._stores.config  # the model's: its attention may be set to another one
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled, or copied without what it holds: use cache.save(path) and "
            "HybridCache.load(path, model.config) to keep it, copy.deepcopy(cache) for a copy."
        )


def fill_from_file(
    cache: HybridCache,
    path: str | os.PathLike[str],
    config: PreTrainedConfig,
    device: torch.device,
    token_ids: TokenIds,
    dtype: torch.dtype,
) -> None:
    """
    Fill an empty cache with what one of the same form has saved; it stays as it was made, and empty after an error.

    Args:
        cache: whose placement, selection, group and other options hold, whatever those of the saved one were.
        path: of the file.
        config: of the model.
        device: of the model.
        token_ids: see `HybridCache.load`.
        dtype: see `HybridCache.load`.

    Raises:
        CacheFileError: see `HybridCache.load`; or it is quantized in another way.
        HostMemoryError: host memory would not suffice.
    """
    stores = cache._stores
    with opened_for(config, path, token_ids) as file:
        saved, asked_for, before = file.codecs, stores.asked_codecs, stores.codecs
        forms = [{index: str(codec) for index, codec in each.items()} for each in (saved, asked_for)]
        same = saved.keys() == asked_for.keys()
        if not same or not all(is_form_of(codec, asked_for[index]) for index, codec in saved.items()):
            differing = [index for index in sorted({*saved, *asked_for}) if forms[0].get(index) != forms[1].get(index)]
            index = differing[0] if differing else min(asked_for)
            there, here = (form.get(index, "in full precision") for form in forms)
            raise CacheFileError(
                path,
                f"is of a cache that is quantized in another way: layer {index} is {there} there and {here} here. "
                "Pass a cache of its form.",
            )
        try:
            stores.take_codecs(saved)
            cache._take(file, conversion(file, dtype, dtype, mmap=False), device)
        except BaseException:
            cache.reset()
            stores.take_codecs(before)
            raise


def contents_of(cache: HybridCache) -> Contents:
    """Return the layers of a cache, and what their stores share, for rooms that keep them."""
    return cache._contents
