"""A store of prompts on the disk, from which a cache gets what was read once."""

import copy
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..cache import HybridCache, contents_of
from ..cache_argument import arguments_kept_back, cache_argument, loop_of
from ..drafts import PromptLookup
from ..model_identity import RANK
from ..processes import Agreement
from ..prompt_reading import forget_images, read_passes, warn_beyond_context
from ..scalars import parse_bytes
from ..token_ids import TokenIds
from .errors import NodeNotFoundError, PrefixStoreError
from .node_files import Head
from .node_states import NodeStates, fill
from .prompt_checks import (
    Prompt,
    cache_of,
    identity_for,
    require_new,
    require_one_prompt,
    require_text,
    require_tokens_alone,
)
from .reuse import Keeper, Reuse, empty, find, keep_conversation, obstacles, take_over
from .stored_prompts import Description, StoredPrompt, StoredPrompts


class PrefixStore(StoredPrompts):
    """
    Prompts in a folder, each read once: the next one that begins alike takes over the states of its first tokens.

    A hit gives the same bits as reading the prompt into an empty store. States are used for exactly the model, its
    weights, its active adapters and the form of cache that they were computed with. Several processes may use a folder
    at once. Those that share a cache call the methods that take it all together; each keeps and finds its own share.

    Args:
        path: of the folder; it is made if there is none.
        max_bytes: the most that it may take, in bytes or as text such as "40GiB"; what was used longest ago goes first.
            `None` for no limit but the disk's.
        min_free_bytes: what stays free on the disk, likewise.
        identity: name of what other programs' code does in models, such as "steering 2.0". Without one a model is
            refused if it has modules that are not of torch, transformers or this package, hooks, or modules with a
            forward of their own. Give another name whenever one of these does something else: states are used under the
            same name alone.
        drafts: tokens of a draft at most, for the answers that `generate` then gives, or the `PromptLookup` that is to
            draft and count them; `None` for none.

    Raises:
        PrefixStoreFolderError: the folder cannot be used, or has other files.
        TypeError: `drafts` is something else.
        ValueError: a size is not one; `drafts` is out of its range.

    Example:
        >>> store = PrefixStore("~/prompts", max_bytes="40GiB")
        >>> cache = QuantizedHybridCache(model.config, bits=4)
        >>> print(store.prefill(model, input_ids, cache))
        7,680 of 8,128 tokens from /home/ada/prompts, the first difference at token 8,064: 1724 instead of 2683
        >>> model.generate(input_ids, cache=cache, max_new_tokens=200)

    Or in one call, see `__call__`:

        >>> model.generate(**inputs, custom_generate=store, max_new_tokens=200)

    And with answers that draft from the prompt:

        >>> store = PrefixStore("~/prompts", drafts=15)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str | None = None,
        min_free_bytes: int | str = "1GiB",
        identity: str | None = None,
        drafts: PromptLookup | int | None = None,
    ):
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        free = parse_bytes(min_free_bytes)
        super().__init__(path, max_bytes=limit, min_free_bytes=free, require_readable=_require_readable)
        self._identity, self._drafts = identity, PromptLookup.of(drafts)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig,
        document_tokens: int = 0,
        title: str = "",
        progress: bool | Callable[[int], None] = True,
        **prepared: Any,
    ) -> Any:
        """
        Read a prompt as `prefill` does, and generate: `generate` calls this if it is passed as `custom_generate`.

        The prompt goes into the cache that `generate` is passed, or into a `DynamicHybridCache`. Then the model's own
        decoding loop runs: greedy, with samples or beams, with several answers, a streamer, criteria and processors.
        transformers passes no tokenizer to a `custom_generate`: instead of `stop_strings` pass
        `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

        Args:
            model: that generates.
            input_ids: the prompt, `[sequences, tokens]`, repeated for beams and answers.
            generation_config: of the call.
            document_tokens: see `prefill`; pass it to `generate`, as the next two.
            title: of the prompt, for lists.
            progress: see `prefill`; what is called gets the number of tokens that came from the store first.
            **prepared: other arguments of the loop: cache, mask, processors, ...

        Returns:
            What `generate` returns.

        Raises:
            PrefixStoreError: see `prefill`; or there are several prompts, or padding, an assistant, prompt lookup, or
                arguments of the model that a prompt's states depend on, such as images.
            ValueError: transformers has no decoding loop for the options, or `use_cache` is False.

        Example:
            >>> store = PrefixStore("prompts")
            >>> model.generate(**inputs, custom_generate=store, max_new_tokens=200)
            >>> cache = QuantizedHybridCache(model.config, bits=4)
            >>> model.generate(**inputs, cache=cache, custom_generate=store, document_tokens=7680, num_beams=4)
        """
        given = arguments_kept_back() | prepared
        require_text(model, input_ids)  # names the images, of which there may be encoded ones alone
        require_tokens_alone(model, generation_config, given)
        require_one_prompt(input_ids, given, document_tokens)
        streamer, cache = given.get("streamer"), cache_of(model, generation_config, given)
        loop = loop_of(model, generation_config, streamer)
        prompt = input_ids[:1]
        self.prefill(model, prompt, cache, document_tokens=document_tokens, title=title, progress=progress)
        if len(input_ids) > 1:  # recurrent states are read before attention would repeat them
            cache.batch_repeat_interleave(len(input_ids))
        config = copy.copy(generation_config)
        config.prefill_chunk_size = None  # the prompt is read but for a token, and 5.17 would read it again
        options = {**prepared, **cache_argument(cache), "generation_config": config}
        if streamer is not None:
            options["streamer"] = streamer
        output = (
            loop(model, input_ids, **options)
            if self._drafts is None
            else self._drafts.run(loop, model, input_ids, **options)
        )
        # Beams are not stored in the order in which they are returned: what is known of them is the prompt.
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        cache.note_tokens(sequences if config.num_beams == 1 else prompt)
        return output

    def prefill(
        self,
        model: PreTrainedModel,
        input_ids: TokenIds,
        cache: HybridCache,
        *,
        document_tokens: int = 0,
        title: str = "",
        details: Mapping[str, Any] | None = None,
        progress: bool | Callable[[int], None] = True,
        at_least: int = 0,
    ) -> Reuse:
        """
        Fill an empty cache with all but the last token of a prompt, which `generate` computes.

        A document alone, to be followed by questions, is read to its last token: pass its length as `document_tokens`.
        What is stored of the prompt is taken from the store; the rest is read, and kept pass by pass. At Ctrl-C the
        pass at hand is finished and kept.

        Args:
            model: a decoder in evaluation mode.
            input_ids: of the whole prompt, `[1, tokens]` or a list.
            cache: for the model, empty.
            document_tokens: how many of the first tokens are those of a document that other prompts begin with, too:
                a pass ends there. Without it a prompt goes on from a multiple of 2,048 tokens, or of 512 if they part
                near the end.
            title: of the prompt, for lists.
            details: of the prompt, for who lists them: names and values of JSON.
            progress: show tokens, tokens a second, and the time that is left. Or what is called with the number of
                tokens that came from the store, and then with that of each pass.
            at_least: nothing is read, and the cache stays empty, if fewer tokens are stored.

        Returns:
            what came from the store.

        Raises:
            PrefixStoreError: the prompt, or one of this model or cache, cannot be kept; or another process that shares
                the cache raises an error.
            PrefixStoreFolderError: the folder cannot be read.
            HostMemoryError: host memory would not suffice.

        Warns:
            UserWarning: there is no room, so what is read is not kept; or a file is damaged, which is removed.
        """
        agreement = _agreement_for(cache)
        prompt = agreement.same(
            lambda: Prompt.to_read(model, input_ids, cache, self._identity, document_tokens, title, details),
            lambda prompt: _checksum(prompt.keys),
        )
        warn_beyond_context(model, prompt.token_ids.shape[1], stacklevel=3)
        forget_images(model)
        match, states, reuse = take_over(self._folder, prompt, agreement, at_least)
        if reuse.num_tokens < at_least:
            return reuse
        keeper = Keeper(self._folder, prompt, match.num_tokens, states)
        with match:
            if callable(progress):
                progress(match.num_tokens)
            ends = prompt.passes.ends(match.num_tokens)
            read_passes(model, prompt.token_ids, cache, ends, None, progress, keeper.after_pass)
        return replace(reuse, is_kept=not keeper.has_failed)

    def keep(
        self,
        model: PreTrainedModel,
        token_ids: TokenIds,
        cache: HybridCache,
        *,
        document_tokens: int | None = None,
        title: str = "",
        details: Mapping[str, Any] | None = None,
        replaces: str | None = None,
    ) -> str:
        """
        Keep a conversation as a cache holds it, so that `resume` goes on as if it had never ended.

        Each time only what is new since the last one is written, from the last multiple of 64 tokens on. Whatever the
        store's own `prefill` has not read, such as answers, or a cache that a program filled or edited, is found by
        this conversation alone: other prompts and conversations with the same tokens do not find it.

        Args:
            model: that answered.
            token_ids: of the conversation, `[1, tokens]` or a list; the cache may lack the last ones.
            cache: holds the first of them.
            document_tokens: how many of them come before the first question, for lists; `None` for those that `prefill`
                of a store has read.
            title: of the conversation, for lists.
            details: of the conversation, see `prefill`.
            replaces: id of the same conversation as it was kept before, so that lists do not have both: a turn that was
                taken back since is removed.

        Returns:
            the id of the conversation.

        Raises:
            PrefixStoreError: a conversation of this model or cache cannot be kept; or another process that shares the
                cache cannot keep its share.
            PrefixStoreFolderError: the folder cannot be written, or has no room.
        """
        agreement = _agreement_for(cache)
        # That of the first of the processes that share the cache.
        seed, *_ = agreement.numbers(lambda: None, lambda _: secrets.randbits(62))[1]

        def keep_share() -> str:
            conversation = Prompt.conversation(
                model, token_ids, cache, self._identity, document_tokens, title, details, seed
            )
            return keep_conversation(self._folder, conversation, replaces)

        return agreement.together(keep_share)

    def resume(self, model: PreTrainedModel, stored: StoredPrompt, cache: HybridCache) -> None:
        """
        Fill an empty cache with a conversation, or a prompt, of `prompts`.

        Args:
            model: of the conversation.
            stored: the conversation; its `token_ids` may have some after those that the cache then holds. Where several
                processes share the cache it may be the share of any of them.
            cache: of the form that it was kept in, empty.

        Raises:
            PrefixStoreError: it is of another model, or another form of cache; or it is gone, or damaged, here or in
                another process that shares the cache.
            HostMemoryError: host memory would not suffice.
        """
        agreement = _agreement_for(cache)
        digest, keys = agreement.same(lambda: self._wanted(model, stored, cache), lambda wanted: _checksum(wanted[1]))

        def fill_share() -> None:
            with self._folder.find(digest, keys) as match:
                if match.num_tokens != len(keys):
                    raise PrefixStoreError(f"{stored.name} is not in {self.path} any more, or not all of it.")
                try:
                    fill(contents_of(cache), match)
                except ValueError as error:
                    raise PrefixStoreError(f"{stored.name} cannot be gone on with: {error}") from error

        try:
            agreement.together(fill_share)
        except BaseException:
            empty(cache)
            raise
        forget_images(model)
        cache.note_tokens(torch.from_numpy(stored.token_ids[: len(keys)])[None])
        contents_of(cache).note_keys(digest, keys)

    def verify(self) -> list[str]:
        """
        Read all files, remove those that are damaged or that this version cannot read, and return what was wrong.

        Raises:
            PrefixStoreFolderError: the folder cannot be read, or changed.
        """
        damages = self._folder.damages()
        for name in damages:
            self._folder.remove_damaged(name)
        return list(damages.values())

    def why(self, model: PreTrainedModel, input_ids: TokenIds, cache: HybridCache, document_tokens: int = 0) -> str:
        """
        Tell what of a prompt is stored, and what keeps the nearest other states from being used.

        Args:
            model: of the prompt.
            input_ids: of the prompt, `[1, tokens]` or a list.
            cache: for it, empty.
            document_tokens: see `prefill`.

        Raises:
            PrefixStoreError: the prompt, or one of this model or cache, cannot be kept.
            PrefixStoreFolderError: the folder cannot be read.
        """
        prompt = Prompt.to_read(model, input_ids, cache, self._identity, document_tokens)
        match, reuse = find(self._folder, prompt)
        match.close()
        return "\n".join([str(reuse), *obstacles(self.prompts(), prompt, reuse.num_tokens)])

    def _wanted(self, model: PreTrainedModel, stored: StoredPrompt, cache: HybridCache) -> tuple[bytes, np.ndarray]:
        """Return the digest of this process's identity, and the keys of a prompt, `[tokens]`, to go on with."""
        identity = identity_for(model, cache, self._identity)
        require_new(cache)
        try:
            keys = self._folder.keys(stored.id)
        except NodeNotFoundError as error:
            raise PrefixStoreError(f"{stored.name} cannot be gone on with: {error}") from error
        if different := identity.without(RANK).differences(stored.identity.without(RANK)):
            raise PrefixStoreError(
                f"{stored.name} is of another model or another form of cache: {'; '.join(different)}."
            )
        return identity.digest, keys


def _agreement_for(cache: HybridCache) -> Agreement:
    """Return the agreement of the processes that share a cache."""

    def failure_of(rank: int) -> PrefixStoreError:
        return PrefixStoreError(f"Rank {rank} could not do its part, and says why; so no process goes on.")

    return Agreement(contents_of(cache).stores.peers if isinstance(cache, HybridCache) else None, failure_of)


def _require_readable(head: Head) -> None:
    """Raise `ValueError` if what a node says of itself is no description."""
    Description.from_json(head.description)
    NodeStates.from_json(head.states)


def _checksum(keys: np.ndarray) -> int:
    """Return a number that differs for other keys of a prompt."""
    return zlib.crc32(keys.tobytes())
