"""The base class of all caches."""

import copy
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..files import CacheFile, CacheFileError
from ..graph_breaks import outside_of_graphs
from ..layers import (
    HybridLayer,
    NoCheckpointError,
    Placement,
    checked_removal,
    follow,
    forget_states_of,
    num_sequences_of,
)
from ..processes import Peers
from ..storage import CacheStats, HostMemoryError, KVCodec
from ..token_ids import TokenIds, as_token_ids
from .checkpoints import Checkpoint, kinds_in_the_way, num_sequences
from .construction import new_contents, require_config
from .contents import Contents, MemoryReport
from .files import require_fit, save, take
from .forward_passes import ForwardPasses
from .prompts import Prompts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HybridCache(DynamicCache):
    """
    A KV cache whose full-attention layers live where `placement` says.

    Layers with a sliding window, or with chunks, keep their last tokens in full precision where the model computes.
    Layers of other types (linear attention, ...) get transformers' own layer, so that every decoder model works. Tokens
    are the same as with transformers' `DynamicCache`, in every generation mode.

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
        offloading: `False`; models that make a cross-attention cache of this class themselves pass it (T5Gemma).

    Raises:
        TypeError: an argument is of another type, such as a class for the config.
        ValueError: one does not fit the model, the machine or the others; the message says which, and the way out.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        placement: Placement | None = None,
        max_length: int | None = None,
        codec: KVCodec | Mapping[int, KVCodec] | None = None,
        group: "ProcessGroup | None" = None,
        offloading: bool = False,
    ):
        require_config(config)
        if offloading:
            raise ValueError("offloading=True is of transformers' own caches: use OffloadedHybridCache(config).")
        peers = None if group is None else Peers(group)
        self._contents = new_contents(config, placement, max_length, codec, peers)
        self._stores = self._contents.stores
        self._passes = ForwardPasses(self._contents)
        self._prompts = Prompts(self._contents, self._passes)
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
            HostMemoryError: host memory would not suffice.
            IncompleteCacheError: the forward pass before this one, or `crop`, reached the first layers only.
            ValueError: the cache is for a model with fewer layers.
        """
        self._passes.note_access(layer_idx, "keys and values")
        layer: Any = self.layers[layer_idx]
        is_ours, batch, num_tokens = isinstance(layer, HybridLayer), key_states.shape[0], layer.get_seq_length()
        if not num_tokens:
            self._passes.require_reached(layer_idx)
        if not is_ours:
            follow(layer, key_states.device)
        if batch > 1 and num_sequences([layer]) == 1:
            if is_ours:  # before any layer is changed for them
                layer.fitting(key_states[:1], value_states[:1])
            self.batch_repeat_interleave(batch)
        try:
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except HostMemoryError as error:
            if (peers := self._stores.peers) is None:
                raise
            raise HostMemoryError(
                f"{error} These are of one of {peers.size} shares: more processes, or fewer bits, make it smaller."
            ) from None
        if self._prompts.are_asked_about:
            self._prompts.note_stored()
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
        stays, and so do the permissions of a file that is replaced. States that are on a device pass through host
        memory layer by layer. Where processes keep a shard each all of them call it, and the first one writes the whole
        file, which is that of one process. Sequences that share blocks are written each with all of them.

        Args:
            path: of the file, in a folder that exists.
            token_ids: of the tokens that are stored, `[batch, tokens]` or a list, to be kept with them: `load` compares
                them with those of a prompt, and `saved_token_ids` returns them. `None` for those that the cache knows,
                if it knows all, see `require_prefix`.
            document_tokens: how many of them, from the start, are those of a document that a conversation follows.
                `hf-hybrid-cache chat` takes questions back as far as that.

        Raises:
            CacheFileError: the file cannot be written; or a codec, or a layer of transformers' own, cannot be saved; or
                positions go on from images, by an offset that the model keeps itself, as Qwen2-VL does.
            ValueError: `token_ids` are not as many as there are tokens, or `document_tokens` are more.
            IncompleteCacheError: something ended a change of the cache half-way.
            LostProcessError: another process ended, or did not call it.

        Example:
            >>> cache = QuantizedHybridCache(model.config, bits=4)
            >>> prefill(model, document_ids, cache)
            >>> cache.save("document.kv")
        """
        self._passes.require_complete()
        self._contents.require_whole()
        self._prompts.refuse_file(path)
        save(self._contents, path, self._prompts.stored() if token_ids is None else token_ids, document_tokens)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        placement: Placement | None = None,
        mmap: bool = False,
        device: torch.device | str | None = None,
        token_ids: TokenIds | None = None,
        verify: bool = True,
        group: "ProcessGroup | None" = None,
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
            group: processes that keep a share each, as many as there are now: all load the same file, and with
                `verify=False` each reads only its share.

        Raises:
            CacheFileError: it is not the whole and unaltered file of a cache for such a model, or of other tokens than
                `token_ids`; or `mmap` is asked for and a layer is not attended to on the CPU.
            HostMemoryError: host memory would not suffice.

        Example:
            >>> cache = HybridCache.load("document.kv", model.config)
            >>> model.generate(torch.cat([document_ids, question_ids], dim=1), cache=cache)
        """
        require_config(config)
        with CacheFile(path) as file:
            require_fit(file, config, token_ids)
            saved = file.description
            # Shares are in host memory, wherever the saved cache was.
            placement = placement or (saved.placement if group is None else Placement())
            try:
                cache = HybridCache(config, placement, saved.max_length, file.codecs, group)
            except ValueError as error:
                raise CacheFileError(path, f"cannot be loaded: {error} Pass placement=Placement(...).") from error
            take(cache, file, device, mmap, verify)
        return cache

    def __repr__(self) -> str:
        """One line with the kinds of layers, their places and sizes."""
        return f"{type(self).__name__}({self._contents.described()})"

    def __str__(self) -> str:
        """Like `repr`, and how each layer is quantized."""
        by_form: dict[str, list[str]] = {}
        for index, codec in self.codecs.items():
            by_form.setdefault(str(codec), []).append(str(index))
        return "\n".join([repr(self), *(f"  layers {', '.join(each)}: {form}" for form, each in by_form.items())])

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
    def stats(self) -> CacheStats:
        """Counters of copies between host and device since the cache was built or reset."""
        return self._stores.stats

    def memory(self) -> MemoryReport:
        """Measure the bytes that the cache holds now, layers of transformers' own and checkpoints included."""
        return self._contents.measured()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """
        Move what is stored to where a model can use it, layer by layer; where it is already, nothing moves.

        A model that computes elsewhere now needs no move: a layer goes where new states come from. This gives memory of
        a device back before that, or changes the type. Layers that live in host memory stay there.

        Args:
            *args: as `torch.Tensor.to` takes them, by position or by name: `device` of the model that will use the
                cache next, `dtype` of its states, both, or another tensor that has them.
            **kwargs: likewise. With `non_blocking=`, `True` or `False`, a device is only announced: accelerate's hooks
                hand every argument of every module to its device, and keys and values would go around with them.

        Raises:
            HostMemoryError: host memory would not suffice; everything is where it was then.
            TypeError: `dtype` is not a floating one.
            ValueError: the device is meta, which holds nothing.
        """
        self._contents.move(*args, **kwargs)
        return self

    @outside_of_graphs
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """
        Tokens of each sequence that are stored, by the first layer of attention or another one.

        Within a forward pass these differ, and some models ask there. A pass that begins while they differ is refused
        with `IncompleteCacheError`.

        Raises:
            ValueError: `generate` is about to continue what is stored with a prompt that is not longer, or begins with
                other tokens, as far as it is known which are stored.
        """
        self._passes.are_asked_about = True
        self._prompts.note_question()
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """
        Prepare for tokens that are taken back, in layers that cannot do so otherwise.

        Raises:
            ValueError: assisted decoding is about to compute the whole prompt, with some tokens stored already.
        """
        self._prompts.note_assisted_decoding()
        super().activate_past_recording()

    @outside_of_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """
        Length and offset of the keys that a mask must cover when `query_length` tokens come next.

        Raises:
            ValueError: there are none.
        """
        self._passes.are_asked_about = True
        if query_length == 0:
            self._prompts.refuse("the prompt")
        return super().get_mask_sizes(query_length, layer_idx)

    def checkpoint(self) -> None:
        """
        Keep what layers will forget of the stored tokens, so that `crop` and `go_back` can return to this length.

        That is all states of layers with a sliding window, chunks, linear attention or convolutions, and of quantized
        layers, whose codecs are chosen by then, the last 64 to 127 tokens in full precision; nothing of other layers.
        `memory` counts it. Checkpoints follow a change of sequences of the cache. They are dropped by `reset`, by going
        back beyond them, and by `layer.set`, and are not kept in files.

        Raises:
            ValueError: nothing is stored, or several processes keep shares of quantized layers, or there are no codes
                for some states.
            IncompleteCacheError: something ended a change of the cache half-way.

        Example:
            >>> prefill(model, document_ids, cache)
            >>> cache.checkpoint()
            >>> model.generate(torch.cat([document_ids, question_ids], dim=1), cache=cache)
            >>> cache.go_back(document_ids.shape[1])
        """
        self._passes.require_complete()
        self._contents.require_whole()
        num_tokens = self._contents.num_tokens
        if not num_tokens:
            raise ValueError("There is nothing to keep: the cache holds no tokens. Read a prompt into it first.")
        if self._contents.stores.peers is not None and self._contents.stores.codecs:
            raise ValueError(
                "Several processes keep shares of quantized layers, of which there are no checkpoints. Use a cache in "
                "full precision, or keep a file with cache.save."
            )
        with torch.inference_mode(False):
            # What comes after it must not choose the codecs.
            self._contents.settle(unseen=False)
            self._contents.checkpoints[num_tokens] = Checkpoint.of(self.layers)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The lengths at which there are checkpoints, in order."""
        return tuple(sorted(self._contents.checkpoints))

    def drop_checkpoint(self, num_tokens: int) -> None:
        """Forget the checkpoint at a length, if there is one, and give its memory back."""
        self._contents.checkpoints.pop(num_tokens, None)

    def go_back(self, num_tokens: int) -> int:
        """
        Go back to the first `num_tokens`, or to the last checkpoint before them where not all layers can be cropped.

        The next `generate` with the whole prompt computes what lies between.

        Returns:
            The tokens that are stored now, at most `num_tokens`.

        Raises:
            ValueError: `num_tokens` is not from 0 to the stored tokens.
            NoCheckpointError: a layer cannot be cropped, and there is no checkpoint.
            IncompleteCacheError: something ended a change of the cache half-way.
        """
        self._contents.require_whole()
        held = self._contents.num_tokens
        if not 0 <= num_tokens <= held:
            raise ValueError(f"go_back({num_tokens}) takes a length from 0 to the {held:,} tokens that are stored.")
        if num_tokens < held and kinds_in_the_way(self.layers, num_tokens, held):
            num_tokens = max((each for each in self.checkpoints if each <= num_tokens), default=num_tokens)
        if num_tokens in self.checkpoints:
            self._put_back(num_tokens)
        elif num_tokens < held:
            self.crop(num_tokens - held)
        return num_tokens

    def keep_common_prefix(self, input_ids: TokenIds) -> int:
        """
        Go back to the tokens that a prompt begins with, so that `generate` with this prompt computes the rest.

        At least the last token of the prompt is left to compute. Where not all layers can be cropped, the cache goes
        back to the last checkpoint before; where there is none, it forgets all tokens.

        Tokens are compared as far as they are known, see `require_prefix`; those after them are forgotten. An answer
        is known after `note_tokens(output)`. Images are not compared.

        Args:
            input_ids: of the whole prompt, `[batch, tokens]` or a list.

        Returns:
            The tokens that are stored now.

        Raises:
            ValueError: tokens are stored and it is not known which, or they are those of another number of sequences.
            IncompleteCacheError: something ended a change of the cache half-way.

        Example:
            >>> cache.keep_common_prefix(inputs.input_ids)
            >>> output = model.generate(**inputs, cache=cache, max_new_tokens=200)
            >>> cache.note_tokens(output)
        """
        token_ids = as_token_ids("input_ids", input_ids)
        if not token_ids.numel():
            raise ValueError(f"input_ids has no tokens: {list(token_ids.shape)}.")
        self._contents.require_whole()
        if not self._contents.num_tokens:
            return 0
        common = self._prompts.num_common(token_ids)
        try:
            return self.go_back(min(common, token_ids.shape[1] - 1))
        except NoCheckpointError:
            self.reset()
            return 0

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` tokens of each sequence, exactly, or all if there are not that many.

        Where there is a checkpoint at the length that is left, all layers are what they were then, to the bit.

        Raises:
            NoCheckpointError: a layer has forgotten what it held then, and there is no checkpoint at that length;
                `go_back` goes to the last checkpoint before it. Layers with windows can go back by 64 tokens.
            ValueError: a positive number, which older versions of transformers took for the length to keep.
            IncompleteCacheError: something ended a change of the cache half-way.

        Nothing has changed then.
        """
        held = self._contents.num_tokens
        tokens_to_remove = checked_removal(tokens_to_remove, held)
        if tokens_to_remove < 0:
            self._contents.require_whole()
            left = max(0, held + tokens_to_remove)
            if left in self.checkpoints:
                self._put_back(left)
                return
            if kinds := kinds_in_the_way(self.layers, left, held):
                lengths = ", ".join(f"{length:,}" for length in self.checkpoints) or "none"
                raise NoCheckpointError(
                    f"The cache cannot go back by {held - left:,} tokens to {left:,}: layers of type "
                    f"{', '.join(kinds)} no longer hold what they held there. Checkpoints are at: {lengths}. "
                    "cache.checkpoint() keeps these states at a length, cache.go_back(n) goes to the last checkpoint "
                    "at or before n, and cache.reset() forgets all."
                )
            self._stores.drop_checkpoints(after=left)
        super().crop(tokens_to_remove)
        self._prompts.keep_stored()

    def _put_back(self, length: int) -> None:
        """Make all layers what they were when the checkpoint of this length was taken."""
        self._stores.drop_checkpoints(after=length)
        with self._contents.changing("crop"), torch.inference_mode(False):
            self._contents.checkpoints[length].put_back(self.layers)
        self._passes.note_put_back()
        self._prompts.keep_stored()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """
        Make sequence `i` what sequence `beam_idx[i]` was.

        Raises:
            IndexError: there are fewer sequences; nothing has changed then.
        """
        if beam_idx.device.type == "cpu" and (sequences := self._sequences()) is not None:
            sequences.index_select(0, beam_idx)  # elsewhere this check would wait for the device
        self._prompts.note_reordered()
        self._reorder("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """
        Keep the sequences that `indices` (integers or a boolean mask) selects, in that order.

        Raises:
            IndexError: there are fewer sequences, or it is neither; nothing has changed then.
        """
        sequences = self._sequences()
        if sequences is not None:
            self._reorder("batch_select_indices", sequences[torch.as_tensor(indices, device="cpu")])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """
        Repeat every sequence `repeats` times, side by side.

        Where layers are attended to on the CPU, or are in full precision, the copies share all whole blocks of 64
        tokens: these are stored once, and a decode step reads them once. docs/continuations.md says what is copied.

        Raises:
            HostMemoryError: host memory would not suffice; nothing has changed then.
            ValueError: `repeats` is negative.
        """
        if repeats < 0:
            raise ValueError(f"Sequences cannot be repeated {repeats} times: pass a number of at least 0.")
        if repeats > 1:
            copied = f"{repeats} copies of {self._contents.num_tokens:,} tokens need"
            self._contents.require_room_for_copies(repeats, copied, are_shared=True)
        with self._contents.changing("batch_repeat_interleave") as checkpoints:
            for layer in self._contents.ours:
                layer.batch_repeat_interleave(repeats)
            for layer in self._contents.theirs:
                if (number := num_sequences_of(layer)) is not None:
                    layer.reorder_cache(torch.arange(number).repeat_interleave(repeats))
            self._change_rows(checkpoints, lambda rows: rows.repeat_interleave(repeats, dim=0))

    def _sequences(self) -> torch.Tensor | None:
        """Return the indices of the sequences of a cache that is whole; `None` if none are stored."""
        self._contents.require_whole()
        held = num_sequences([*self._contents.ours, *self._contents.theirs])
        return None if held is None else torch.arange(held)

    def _reorder(self, operation: str, indices: torch.Tensor) -> None:
        with self._contents.changing(operation) as checkpoints:
            super().reorder_cache(indices)  # type: ignore[arg-type]
            self._change_rows(checkpoints, lambda rows: rows[indices.cpu()])

    def _change_rows(
        self, checkpoints: Mapping[int, Checkpoint], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Let checkpoints and known tokens follow a change of sequences, of which `change` makes rows."""
        for checkpoint in checkpoints.values():
            checkpoint.sequences = change(checkpoint.sequences)
        self._prompts.change_rows(change)

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
        self._stores.drop_checkpoints()  # first: after an interruption other tokens may come
        super().reset()
        for layer in self.layers:
            forget_states_of(layer)
        stores = self._stores
        stores.take_seen_queries({})
        stores.unfinished = None
        stores.attention.reset()
        if stores.cpu_fraction is not None:
            stores.cpu_fraction.reset()
        self._passes.reset()
        self._prompts.reset()
        self.stats.clear()

    def require_prefix(self, token_ids: torch.Tensor) -> None:
        """
        Check that a prompt begins with the tokens that are stored, as far as it is known which these are.

        They are known after `prefill`, `note_tokens`, `load` of a file that has them, and `generate` with an empty
        cache, or one that held known tokens. `generate` checks its prompt by itself. The tokens of an answer are known
        once a prompt contains it.

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
        self._contents.require_room_for_copies(2, f"A copy of {self._contents.num_tokens:,} tokens needs")
        memo[id(self)] = twin = type(self).__new__(type(self))
        memo[id(self._stores.config)] = self._stores.config  # the model's: its attention may be set to another one
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled, or copied without what it holds: use cache.save(path) and "
            "HybridCache.load(path, model.config) to keep it, copy.deepcopy(cache) for a copy."
        )


def contents_of(cache: HybridCache) -> Contents:
    """Return the layers of a cache, and what their stores share, for rooms that keep them."""
    return cache._contents
