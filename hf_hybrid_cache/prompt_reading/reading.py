"""Reading a prompt into a cache, chunk by chunk."""

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import HybridCache
from ..cache_argument import cache_argument
from ..prefill_chunks import PREFILL_CHUNK_SIZE
from ..scalars import as_integer
from ..token_ids import TokenIds, as_token_ids
from .checkpoint import Checkpoint
from .images import forget_images
from .interrupts import finishing
from .one_pass import layer_that_begins_anew
from .progress import PrefillProgress


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: TokenIds,
    cache: Cache,
    *,
    attention_mask: torch.Tensor | None = None,
    chunk_size: int = PREFILL_CHUNK_SIZE,
    progress: bool | Callable[[int], None] = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Cache:
    """
    Read a prompt into a cache: a document that questions follow, or all but the last token of what `generate` gets.

    No logits are kept, and no more activations than those of a chunk. Tokens that the cache holds already are not read
    again. At Ctrl-C the chunk at hand is finished, and the cache is whole: call it again to go on. A second Ctrl-C ends
    at once.

    Args:
        model: a decoder.
        input_ids: of the prompt, `[batch, tokens]` or a list; all of them are read.
        cache: for the model; empty, or with the first tokens of the prompt.
        attention_mask: `[batch, tokens]`, 0 where a prompt is filled up on the left; `None` for none.
        chunk_size: tokens in a forward pass.
        progress: show tokens, tokens a second, and the time that is left: in a bar on a terminal and in a notebook;
            elsewhere in lines on standard error, the first after half a minute, then one a minute. Or what is called
            with the number of tokens of each chunk.
        checkpoint: file to keep the cache in while the prompt is read, and at the end. If it is there already, `cache`
            is filled with what it holds, and stays where it was made to be. Writing takes about 3% of the time at most;
            what was read since the last time is lost with the process. Processes that share a cache have one file.

    Returns:
        `cache`.

    Raises:
        ValueError: the cache holds something else, or more; or an argument is not what it should be; or the model needs
            all tokens in one pass.
        TypeError: a checkpoint of a cache that has no file, or an encoder-decoder model.
        CacheFileError: `checkpoint` is of another prompt or model, or of a cache that is quantized in another way, or
            cannot be written.

    Example:
        >>> cache = prefill(model, document_ids, QuantizedHybridCache(model.config, bits=4), checkpoint="report.kv")
        >>> model.generate(torch.cat([document_ids, question_ids], dim=1), cache=cache, max_new_tokens=200)
    """
    token_ids = as_token_ids("input_ids", input_ids)
    chunk = _checked(model, token_ids, attention_mask, chunk_size)
    kept = None if checkpoint is None else Checkpoint(checkpoint, cache)
    end = token_ids.shape[1]
    if kept is not None:
        kept.take_up(model, token_ids)
    if isinstance(cache, HybridCache):
        cache.require_prefix(token_ids)
    start = cache.get_seq_length()
    if start > end:
        raise ValueError(
            f"The cache holds {start:,} tokens, and the prompt has {end:,}: pass a prompt that goes on, or a new cache."
        )
    warn_beyond_context(model, end, stacklevel=4)  # of who calls prefill, beneath no_grad

    def keep(reached: int, is_last: bool) -> None:
        if kept is not None:
            kept.write_if_due(token_ids[:, :reached], is_last)

    ends = [*range(start + chunk, end, chunk), *([end] if start < end else [])]
    if (start or len(ends) > 1) and (layer := layer_that_begins_anew(model)):
        raise ValueError(
            f"{layer} of transformers forgets what came before each forward pass of several tokens, and this prompt of "
            f"{end:,} tokens takes more than one. Use an empty cache, and a chunk_size of {end:,} or more."
        )
    read_passes(model, token_ids, cache, ends, attention_mask, progress, keep)
    return cache


def read_passes(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    ends: Sequence[int],
    attention_mask: torch.Tensor | None,
    progress: bool | Callable[[int], None],
    after_pass: Callable[[int, bool], None],
) -> None:
    """
    Read a prompt on from where the cache ends, in passes that end where `ends` says, up to the one at hand at Ctrl-C.

    Args:
        model: see `prefill`.
        token_ids: of the prompt, `[batch, tokens]`.
        cache: see `prefill`.
        ends: numbers of tokens after which passes end; the last one is that of the prompt.
        attention_mask: see `prefill`.
        progress: see `prefill`.
        after_pass: called after each with the number of tokens that are read, and whether it was the last pass.
    """
    start, end = cache.get_seq_length(), ends[-1] if ends else cache.get_seq_length()
    if not start:
        forget_images(model)
    inputs = _Inputs(model, token_ids, attention_mask)
    with torch.no_grad(), PrefillProgress(start, end, progress is True) as shown, finishing() as is_interrupted:
        for following in ends:
            model(**inputs.of(start, following), **cache_argument(cache), use_cache=True)
            shown.reach(following)
            if callable(progress):
                progress(following - start)
            start = following
            if isinstance(cache, HybridCache):
                cache.note_tokens(token_ids[:, :start])
            is_last = start == end or is_interrupted()
            after_pass(start, is_last)
            if is_last:
                break


def _checked(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, chunk_size: int
) -> int:
    """Check all arguments, and return the size of a chunk."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError("prefill is for decoders: an encoder-decoder model reads its prompt in the encoder, at once.")
    if not input_ids.numel():
        raise ValueError(f"input_ids has no tokens: {list(input_ids.shape)}.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be as input_ids, {list(input_ids.shape)}, got {list(attention_mask.shape)}."
        )
    chunk = as_integer(chunk_size)
    if chunk is None or chunk < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}.")
    return chunk


def warn_beyond_context(model: PreTrainedModel, num_tokens: int, stacklevel: int) -> None:
    """Warn of a prompt that is longer than the model's context, before the time for it is spent."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and num_tokens > context:
        warnings.warn(
            f"The prompt has {num_tokens:,} tokens, and the model's context is {context:,}: answers may be nonsense. "
            "Cut the prompt.",
            stacklevel=stacklevel,
        )


class _Inputs:
    """The arguments of the model for each chunk."""

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None):
        self._input_ids = input_ids.to(model.device)
        is_padded = attention_mask is not None and not bool(attention_mask.all())
        self._mask = attention_mask.to(model.device) if attention_mask is not None and is_padded else None
        parameters = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._positions: torch.Tensor | None = None
        if "position_ids" in parameters:
            # As `generate` counts them. Without them Bamba begins at 0 in each pass.
            counted = torch.ones_like(self._input_ids) if self._mask is None else self._mask.long()
            self._positions = (counted.cumsum(-1) - 1).clamp_min(0)

    def of(self, start: int, end: int) -> dict[str, Any]:
        """Return the arguments for tokens from `start` to before `end`."""
        inputs = {"input_ids": self._input_ids[:, start:end], **self._options}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask[:, :end]
        if self._positions is not None:
            inputs["position_ids"] = self._positions[:, start:end]
        return inputs
