"""The states of a conversation in a cache, and the ways back."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache
from ..layers import DeviceMemoryError, HybridLayer, IncompleteCacheError, NoCheckpointError
from ..prompt_reading import prefill
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


class States:
    """
    A cache, and how it takes tokens and gives them up again.

    Args:
        model: reads tokens.
        cache: empty, or what makes an empty one.
        progress: see `prefill`.

    Attributes:
        cache: holds the first tokens of a conversation.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache | Callable[[], Cache], progress: bool | Callable[[int], None]
    ):
        self._model, self._progress = model, progress
        self._make = None if isinstance(cache, Cache) else cache
        self.cache = cache if isinstance(cache, Cache) else cache()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the cache holds."""
        return int(self.cache.get_seq_length())

    def read(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Read those of the tokens, `[sequences, tokens]`, that the cache lacks."""
        if input_ids.shape[1] > self.num_tokens:
            prefill(self._model, input_ids, self.cache, attention_mask=mask, progress=self._progress)

    def keep_checkpoint(self) -> None:
        """Let the cache go back to what it holds now: the document, or what comes before a question."""
        if isinstance(self.cache, HybridCache) and self.num_tokens:
            self.cache.checkpoint()
            for length in self.cache.checkpoints[1 : 1 - _MOST_CHECKPOINTS]:
                self.cache.drop_checkpoint(length)

    def shorten(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Forget all tokens after the first `num_tokens`, or more, and of several sequences all but the first."""
        more = self.num_tokens - num_tokens
        try:
            if isinstance(self.cache, HybridCache):
                if more > 0:
                    self.cache.go_back(num_tokens)
                if num_sequences > 1:
                    self.cache.batch_select_indices(torch.tensor([0]))
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
    def whole_afterwards(self) -> Iterator[None]:
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
    return takes_positions and all(isinstance(layer, HybridLayer) for layer in layers)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full."""
    is_memory = isinstance(error, MemoryError | DeviceMemoryError | torch.OutOfMemoryError)
    return is_memory or any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY)
