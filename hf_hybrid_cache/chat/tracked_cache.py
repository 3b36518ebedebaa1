"""A cache whose tokens are known, and the ways back to fewer of them."""

import inspect
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from ..layers import DeviceMemoryError, HybridLayer, IncompleteCacheError, NoCheckpointError
from ..prefix_store import PrefixStore, Reuse, StoredPrompt
from ..prompt_reading import prefill
from ..token_ids import num_common
from .generating import Generation, Generator
from .settings import DEFAULT_BITS

CACHES: Mapping[str, Callable[..., Cache]] = {
    "stock": DynamicCache,
    "dynamic": DynamicHybridCache,
    "offloaded": OffloadedHybridCache,
    "quantized": QuantizedHybridCache,
}
# Checkpoints that are kept: that of the document, and those before the last questions.
_MOST_CHECKPOINTS = 4
# RuntimeErrors of the CPU allocators
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class TrackedCache:
    """
    A cache, the tokens whose states it holds, and the ways to others.

    Which tokens are computed is a matter of tokens alone: those of a prompt that the cache begins with stay, whoever
    brought them, and the rest is read.

    Args:
        model: reads tokens.
        cache: empty, or what makes an empty one.
        progress: see `prefill`.

    Attributes:
        cache: holds the first tokens of a conversation.
        progress: of what is read next.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache | Callable[[], Cache], progress: bool | Callable[[int], None]
    ):
        self._model, self.progress = model, progress
        self._make = None if isinstance(cache, Cache) else cache
        self.cache = cache if isinstance(cache, Cache) else cache()
        # The cache holds the first of them, however their pass ended.
        self._passed = list[int]()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the cache holds."""
        return int(self.cache.get_seq_length())

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose states the cache holds."""
        return self._passed[: self.num_tokens]

    def read(self, token_ids: list[int]) -> None:
        """Go back to the tokens that these begin with, or to fewer, and read the rest."""
        self.go_back(num_common(self.token_ids, token_ids))
        self._passed = token_ids
        with self._whole_afterwards():
            self._read_rest(torch.tensor([token_ids]))

    def read_with(self, store: PrefixStore, token_ids: list[int], **options: Any) -> Reuse:
        """Read a prompt anew, by `PrefixStore.prefill` with its options."""
        self.forget()
        self._passed, cache = token_ids, self.cache
        assert isinstance(cache, HybridCache)
        with self._whole_afterwards():
            return store.prefill(self._model, token_ids, cache, progress=self.progress, **options)

    def resume(self, store: PrefixStore, stored: StoredPrompt) -> None:
        """Take the states of a conversation from a store."""
        assert isinstance(self.cache, HybridCache)
        store.resume(self._model, stored, self.cache)
        self._passed = stored.token_ids.tolist()

    def answer(self, generator: Generator, into: Generation) -> abc.Generator[tuple[int, str], None, None]:
        """
        Yield the texts of answers, see `Generator.pieces`.

        After several the cache holds what it held of all their prompts before.
        """
        prompts, held = [asked.token_ids for asked in into.asked], self.token_ids
        base = min(num_common(held, prompt[:-1]) for prompt in prompts)
        rows, mask = _together(prompts, base)
        try:
            with self._whole_afterwards():
                self.go_back(base)
                self._passed = prompts[0]
                if len(prompts) > 1 and self.num_tokens:  # recurrent layers are not expanded by `generate`
                    self.cache.batch_repeat_interleave(len(prompts))
                self._read_rest(rows[:, :-1], mask[:, :-1])
                yield from generator.pieces(rows, mask, self.cache, into)
        finally:
            if len(prompts) == 1:
                self._passed = [*prompts[0], *into.token_ids[0]]
            else:
                self.go_back(base)
                if self.num_tokens:
                    self.cache.batch_select_indices(torch.tensor([0]))

    def _read_rest(self, rows: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Read what the cache lacks of prompts, `[prompts, tokens]`."""
        if rows.shape[1] > self.num_tokens:
            prefill(self._model, rows, self.cache, attention_mask=mask, progress=self.progress)

    def keep_checkpoint(self) -> None:
        """Let the cache go back to what it holds now: the document, or what comes before a question."""
        if isinstance(self.cache, HybridCache) and self.num_tokens:
            self.cache.checkpoint()
            for length in self.cache.checkpoints[1 : 1 - _MOST_CHECKPOINTS]:
                self.cache.drop_checkpoint(length)

    def go_back(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`, or more."""
        more = self.num_tokens - num_tokens
        try:
            if more > 0 and isinstance(self.cache, HybridCache):
                self.cache.go_back(num_tokens)
            elif more > 0:
                self.cache.crop(-more)
        except (NoCheckpointError, IncompleteCacheError):
            self.forget()
        except RuntimeError:  # of transformers' own layers with a window, and recurrent ones
            if isinstance(self.cache, HybridCache):
                raise
            self.forget()

    def forget(self) -> None:
        """Forget all tokens; the codecs that a quantized cache has chosen go, too."""
        if self._make is None:
            self.cache.reset()
        elif self.num_tokens:
            self.cache = self._make()

    @contextmanager
    def _whole_afterwards(self) -> Iterator[None]:
        """After an error forget the tokens that only some layers hold, or those after a checkpoint, or all."""
        try:
            yield
        except BaseException as error:
            if isinstance(self.cache, HybridCache):
                try:
                    self.cache.drop_unfinished()
                except IncompleteCacheError:
                    self._go_back_to_checkpoint(self.cache)
            elif isinstance(error, Exception):  # Ctrl-C and who closes an answer wait for the end of a step
                self.forget()
            raise

    def _go_back_to_checkpoint(self, cache: HybridCache) -> None:
        """Go back to the last checkpoint, or forget all where there is none, or what is stored is not whole."""
        with suppress(IncompleteCacheError, IndexError):
            cache.go_back(cache.checkpoints[-1])
            return
        self.forget()


def _together(prompts: Sequence[list[int]], base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return prompts that begin with the same `base` tokens, `[prompts, tokens]`, and their attention mask.

    Shorter ones are padded after these, so that all begin alike. Padding is a token that comes before, which a
    repetition penalty counts already.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    filler = prompts[0][base - 1] if base else 0
    rows = [[*ids[:base], *[filler] * pads, *ids[base:]] for pads, ids in zip(padding, prompts, strict=True)]
    positions = torch.arange(longest) - base
    is_padding = (positions >= 0) & (positions < torch.tensor(padding)[:, None])
    return torch.tensor(rows), (~is_padding).long()


def cache_maker(name: str, model: PreTrainedModel, bits: int | None, cpu_decode: bool | None) -> Callable[[], Cache]:
    """Return what makes an empty cache; raises `ValueError` if there is none of that name, or it has no bits."""
    if name not in CACHES:
        raise ValueError(f"There is no cache {name!r}: use one of {', '.join(CACHES)}.")
    if bits is not None and name != "quantized":
        raise ValueError(f"bits={bits} is for a quantized cache, and the cache is {name}: drop one of them.")
    if name == "stock":
        return lambda: DynamicCache(config=model.config)
    options: dict[str, Any] = {"cpu_decode": cpu_decode}
    if name == "quantized":
        options["bits"] = bits or DEFAULT_BITS
    return lambda: CACHES[name](model.config, **options)


def can_answer_together(model: PreTrainedModel) -> bool:
    """Return whether padding changes no answer: attention sees all tokens, and positions can be given."""
    layers = DynamicHybridCache(model.config).layers
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and all(isinstance(layer, HybridLayer) and not layer.is_sliding for layer in layers)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full."""
    is_memory = isinstance(error, MemoryError | DeviceMemoryError | torch.OutOfMemoryError)
    return is_memory or any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY)
