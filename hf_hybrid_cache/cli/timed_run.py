"""One timed generation with any of the caches."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ..cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache, SameLogits
from ..cache_argument import cache_argument
from ..layers import Selection, tensors_of
from ..prompt_reading import PREFILL_CHUNK_SIZE, prefill
from .console import UsageError
from .sampling import GREEDY, Sampling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class CacheOptions:
    """What the command line can set about a cache; each cache takes what concerns it."""

    prefetch_layers: int = 1
    resident_layers: int = 0
    device_tokens: int = 0
    cpu_decode: bool | float | Literal["auto"] | None = None
    bits: int = 4
    group: "ProcessGroup | None" = None
    selection: Selection | None = None

    @property
    def of_layers(self) -> bool | None:
        """`cpu_decode` of a cache that is in one place."""
        return self.cpu_decode if isinstance(self.cpu_decode, bool) else None


CACHES: dict[str, Callable[[PreTrainedConfig, CacheOptions], Cache]] = {
    "stock": lambda config, options: DynamicCache(config=config),
    "dynamic": lambda config, options: DynamicHybridCache(
        config, cpu_decode=options.of_layers, group=options.group, selection=options.selection
    ),
    "offloaded": lambda config, options: OffloadedHybridCache(
        config,
        options.prefetch_layers,
        options.resident_layers,
        cpu_decode=options.cpu_decode,
        device_tokens=options.device_tokens,
        selection=options.selection,
    ),
    "quantized": lambda config, options: QuantizedHybridCache(
        config, options.bits, cpu_decode=options.of_layers, group=options.group, selection=options.selection
    ),
}

# By several processes.
SHAREABLE = ("dynamic", "quantized")


def new_cache(name: str, config: PreTrainedConfig, options: CacheOptions) -> Cache:
    """
    An empty cache, one of `CACHES`.

    Raises:
        UsageError: it does not fit the model.
    """
    try:
        return CACHES[name](config, options)
    except ValueError as error:  # a cache checks its options against the model
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Run:
    """
    One generation, timed.

    Attributes:
        tokens: the new tokens.
        prefill_seconds: until the first of them was there.
        decode_seconds: for all the others.
        device_bytes: of KV in the memory of accelerators, at the end.
        host_bytes: of KV in host memory, at the end.
        share_read: of the tokens that attention may leave out some of; `None` where it reads all.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    device_bytes: int
    host_bytes: int
    share_read: float | None = None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None when the answer was a single token."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None

    def first_difference(self, other: "Run") -> int | None:
        """Position of the first token, counted from 1, that differs from the other run's; None if all are the same."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        if different := next((position for position, (a, b) in enumerate(pairs, 1) if a != b), None):
            return different
        lengths = len(self.tokens), len(other.tokens)
        return None if lengths[0] == lengths[1] else min(lengths) + 1


def timed_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    max_new_tokens: int,
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    on_prefill: Callable[[int], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    sampling: Sampling = GREEDY,
) -> Run:
    """
    Generate with `model.generate` and time the prefill and the decode steps apart.

    Args:
        model: of any decoder architecture.
        input_ids: [1, tokens]
        cache: an empty one, or one that holds the first tokens, which are not computed again then.
        max_new_tokens: at most; an end-of-text token ends the answer before.
        prefill_chunk_size: tokens of the prompt per forward pass.
        on_prefill: called with the number of tokens after each chunk, of all but the last token of the prompt.
        on_token: called with each new token.
        sampling: how tokens are chosen.
    """
    input_ids = input_ids.to(model.device)
    recorder = _Recorder(on_token)
    group = cache.group if isinstance(cache, HybridCache) else None

    _synchronize(model)
    start = time.perf_counter()
    if input_ids.shape[1] > 1:
        prefill(model, input_ids[:, :-1], cache, chunk_size=prefill_chunk_size, progress=on_prefill or False)
    sampling.start()
    model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **cache_argument(cache),
        max_new_tokens=max_new_tokens,
        streamer=recorder,
        **sampling.options(),
        logits_processor=None if group is None else LogitsProcessorList([SameLogits(group)]),
    )
    _synchronize(model)
    end = time.perf_counter()
    if isinstance(cache, HybridCache):
        cache.note_tokens(torch.cat([input_ids.cpu(), torch.tensor([recorder.tokens], dtype=torch.long)], dim=1))
    return Run(
        recorder.tokens, recorder.first_token - start, end - recorder.first_token, *_memory(cache), _share_read(cache)
    )


def _share_read(cache: Cache) -> float | None:
    if not isinstance(cache, HybridCache) or not cache.stats.tokens_held:
        return None
    return cache.stats.tokens_read.total() / cache.stats.tokens_held.total()


def warm_up(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> None:
    """Two tokens from the start of the prompt, so that what is set up or compiled once is not timed."""
    timed_generate(model, input_ids[:, :WARM_UP_TOKENS], cache, max_new_tokens=2)


class _Recorder(BaseStreamer):
    """Keeps the new tokens and the time of the first; `generate` hands the prompt over first."""

    def __init__(self, on_token: Callable[[int], None] | None):
        self.tokens: list[int] = []
        self.first_token = 0.0
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        if not self.tokens:
            self.first_token = time.perf_counter()
        self.tokens.append(int(value))
        if self._on_token:
            self._on_token(self.tokens[-1])

    def end(self) -> None:
        pass


def _memory(cache: Cache) -> tuple[int, int]:
    """Bytes of KV in accelerator memory and in host memory."""
    if isinstance(cache, HybridCache):
        report = cache.memory()
        return report.device_bytes, report.host_bytes
    tensors = [held for layer in cache.layers for held in tensors_of(layer)]
    total = sum(tensor.nbytes for tensor in tensors)
    host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return total - host, host


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
