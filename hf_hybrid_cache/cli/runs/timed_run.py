"""One timed generation with any of the caches."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ...cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache, SameLogits
from ...cache_argument import cache_argument
from ...layers import Selection, tensors_of
from ...prompt_reading import prefill
from ..choices import DEFAULT_BITS
from ..console import UsageError
from .answer_options import AnswerOptions
from .finish_reason import until_end

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class CacheOptions:
    """The options of all caches; each cache takes those that it has."""

    prefetch_layers: int = 1
    resident_layers: int = 0
    device_tokens: int = 0
    cpu_decode: bool | float | Literal["auto"] | None = None
    bits: int = DEFAULT_BITS
    group: "ProcessGroup | None" = None
    selection: Selection | None = None

    @property
    def undivided_cpu_decode(self) -> bool | None:
        """`cpu_decode` of a cache whose tokens are all in one memory."""
        return self.cpu_decode if isinstance(self.cpu_decode, bool) else None


CACHES: dict[str, Callable[[PreTrainedConfig, CacheOptions], Cache]] = {
    "stock": lambda config, options: DynamicCache(config=config),
    "dynamic": lambda config, options: DynamicHybridCache(
        config, cpu_decode=options.undivided_cpu_decode, group=options.group, selection=options.selection
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
        config, options.bits, cpu_decode=options.undivided_cpu_decode, group=options.group, selection=options.selection
    ),
}

# Several processes can divide the tokens of these.
DISTRIBUTED_CACHES = ("dynamic", "quantized")


def new_cache(name: str, config: PreTrainedConfig, options: CacheOptions) -> Cache:
    """
    Make an empty cache, one of `CACHES`.

    Raises:
        UsageError: the options do not fit the model.
    """
    try:
        return CACHES[name](config, options)
    except ValueError as error:  # a cache checks its options against the model
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Run:
    """
    The tokens, times and memory of one generation.

    Attributes:
        tokens: the new tokens.
        prefill_seconds: from the start to the first new token.
        decode_seconds: from the first new token to the last.
        device_bytes: bytes of keys and values in the memory of accelerators, at the end.
        host_bytes: bytes of keys and values in host memory, at the end.
        fraction_read: the part of the selectable tokens that attention read; `None` where it reads all.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    device_bytes: int
    host_bytes: int
    fraction_read: float | None = None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the first; `None` for an answer of one token."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None

    def first_difference(self, other: "Run") -> int | None:
        """The position, counted from 1, of the first token that differs from the other run's; `None` if none does."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        if different := next((position for position, (a, b) in enumerate(pairs, 1) if a != b), None):
            return different
        lengths = len(self.tokens), len(other.tokens)
        return None if lengths[0] == lengths[1] else min(lengths) + 1


def timed_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    options: AnswerOptions,
    on_prefill: Callable[[int], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    fill: Callable[[], None] | None = None,
) -> Run:
    """
    Generate with `model.generate`, and time the prefill and the decode steps separately.

    Args:
        model: of any decoder architecture.
        input_ids: `[1, tokens]`, the prompt.
        cache: empty, or with the first tokens of the prompt, which are not computed again.
        options: how the prompt is read and the answer is generated.
        on_prefill: called after each chunk of the prompt with its number of tokens; no chunk has the last token.
        on_token: called with each new token.
        fill: fills the cache with the first tokens of the prompt; its time is one of the prefill.
    """
    recorder = _Recorder(on_token)
    _synchronize(model)
    start = time.perf_counter()
    if fill is not None:
        fill()
    _generate(model, input_ids, torch.ones_like(input_ids), cache, options, recorder, on_prefill)
    _synchronize(model)
    end = time.perf_counter()
    return Run(
        recorder.tokens,
        recorder.first_token - start,
        end - recorder.first_token,
        *_memory(cache),
        _fraction_read(cache),
    )


def generate_rows(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Cache,
    options: AnswerOptions,
    on_token: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """
    Generate several answers with one `model.generate`; returns the new tokens of each, up to its own end token.

    Args:
        model: of any decoder architecture.
        input_ids: `[answers, tokens]`, the prompts.
        attention_mask: the same shape; 0 for padding.
        cache: empty, or with the first tokens of the prompts: of each, or of one that all others begin with.
        options: how the prompts are read and the answers are generated.
        on_token: called with each new token of the first answer.
    """
    recorder = _Recorder(on_token)
    _generate(model, input_ids, attention_mask, cache, options, recorder)
    return [until_end(model, row) for row in recorder.rows]


def _generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Cache,
    options: AnswerOptions,
    recorder: "_Recorder",
    on_prefill: Callable[[int], None] | None = None,
) -> None:
    group = cache.group if isinstance(cache, HybridCache) else None
    input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
    if input_ids.shape[1] > 1:
        prefill(
            model,
            input_ids[:, :-1],
            cache,
            attention_mask=attention_mask[:, :-1],
            chunk_size=options.prefill_chunk_size,
            progress=on_prefill or False,
        )
    options.sampling.start()
    model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=attention_mask,
        **cache_argument(cache),
        max_new_tokens=options.max_new_tokens,
        streamer=recorder,
        **options.sampling.options(),
        logits_processor=None if group is None else LogitsProcessorList([SameLogits(group)]),
    )
    if isinstance(cache, HybridCache):
        cache.note_tokens(torch.cat([input_ids.cpu(), torch.tensor(recorder.rows, dtype=torch.long)], dim=1))


def _fraction_read(cache: Cache) -> float | None:
    if not isinstance(cache, HybridCache) or not cache.stats.tokens_held:
        return None
    return cache.stats.tokens_read.total() / cache.stats.tokens_held.total()


def warm_up(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> None:
    """Generate two tokens after the start of the prompt, so that no timed run compiles anything."""
    timed_generate(model, input_ids[:, :WARM_UP_TOKENS], cache, AnswerOptions(max_new_tokens=2))


class _Recorder(BaseStreamer):
    """Records new tokens and the time of the first one, after the prompts, which `generate` passes first."""

    def __init__(self, on_token: Callable[[int], None] | None):
        self.rows: list[list[int]] = []
        self.first_token = 0.0
        self._on_token = on_token
        self._is_prompt = True

    @property
    def tokens(self) -> list[int]:
        """New tokens of the first sequence."""
        return self.rows[0] if self.rows else []

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        if not self.rows:
            self.first_token = time.perf_counter()
            self.rows = [[] for _ in value]
        for row, token in zip(self.rows, value.tolist(), strict=True):
            row.append(token)
        if self._on_token:
            self._on_token(self.tokens[-1])

    def end(self) -> None:
        pass


def _memory(cache: Cache) -> tuple[int, int]:
    """Bytes of KV in accelerator memory and in host memory."""
    if isinstance(cache, HybridCache):
        report = cache.memory()
        return report.device_bytes, report.host_bytes
    tensors = [tensor for layer in cache.layers for tensor in tensors_of(layer)]
    total = sum(tensor.nbytes for tensor in tensors)
    host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return total - host, host


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
