"""Reading a prompt into a cache, chunk by chunk, and keeping it in a file meanwhile."""

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .cache import HybridCache, contents_of, fill_from_file
from .cache_argument import cache_argument
from .files import CacheFileError
from .scalars import PREFILL_CHUNK_SIZE, as_integer, duration_text
from .token_ids import TokenIds, as_token_ids

# The pause between two writes of a checkpoint: so many times the time of the last one, and at least so many seconds.
_REST, _LEAST_SECONDS = 30, 60.0
# A line of progress comes after the first chunk that ends so many seconds after the start, or after the line before.
_FIRST_SECONDS, _FOLLOWING_SECONDS = 30.0, 60.0
# Layers whose scan of several tokens takes no state to begin with; decode steps of one token do.
_LAYERS_THAT_BEGIN_ANEW = {"FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"}


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
    chunk = _checked_chunk(model, token_ids, attention_mask, chunk_size)
    file = None if checkpoint is None else _Checkpoint(checkpoint, model, token_ids, cache)
    if file is not None:
        file.take_up()
    if isinstance(cache, HybridCache):
        cache.require_prefix(token_ids)
    start, end = cache.get_seq_length(), token_ids.shape[1]
    if start > end:
        raise ValueError(
            f"The cache holds {start:,} tokens, and the prompt has {end:,}: pass a prompt that goes on, or a new cache."
        )
    warn_beyond_context(model, end, stacklevel=4)  # of who calls prefill, beneath no_grad
    ends = [*range(start + chunk, end, chunk), *([end] if start < end else [])]
    if (start or len(ends) > 1) and (layer := layer_that_begins_anew(model)):
        raise ValueError(
            f"{layer} of transformers forgets what came before each forward pass of several tokens, and this prompt of "
            f"{end:,} tokens takes more than one. Use an empty cache, and a chunk_size of {end:,} or more."
        )
    read_passes(model, token_ids, cache, ends, attention_mask, progress, None if file is None else file.after_pass)
    return cache


def read_passes(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    ends: Sequence[int],
    attention_mask: torch.Tensor | None,
    progress: bool | Callable[[int], None],
    after_pass: Callable[[int, bool], None] | None,
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
        after_pass: called after each with the number of tokens that are read, and whether it was the last pass;
            `None` for nothing.
    """
    start = cache.get_seq_length()
    end = ends[-1] if ends else start
    if not start:
        forget_images(model)
    parameters = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    input_ids = token_ids.to(model.device)
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    mask = attention_mask.to(model.device) if attention_mask is not None and is_padded else None
    # As `generate` counts positions. Without them Bamba begins at 0 in each pass.
    counted = torch.ones_like(input_ids) if mask is None else mask.long()
    positions = (counted.cumsum(-1) - 1).clamp_min(0) if "position_ids" in parameters else None
    with (
        torch.no_grad(),
        contextlib.closing(PrefillProgress(start, end, progress is True)) as shown,
        finishing() as is_interrupted,
    ):
        for following in ends:
            inputs = {"input_ids": input_ids[:, start:following]}
            if mask is not None:
                inputs["attention_mask"] = mask[:, :following]
            if positions is not None:
                inputs["position_ids"] = positions[:, start:following]
            model(**inputs, **options, **cache_argument(cache), use_cache=True)
            shown.reach(following)
            before, start = start, following
            if isinstance(cache, HybridCache):
                cache.note_tokens(token_ids[:, :start])
            is_last = start == end or is_interrupted()
            if after_pass is not None:
                after_pass(start, is_last)
            if callable(progress):
                progress(start - before)
            if is_last:
                break


def forget_images(model: PreTrainedModel) -> None:
    """Let a model count positions from 0, as `generate` does for a new prompt, not on from the images of the last."""
    for module in model.modules():
        if "rope_deltas" in vars(module):
            module.rope_deltas = None  # type: ignore[assignment]


def layer_that_begins_anew(model: PreTrainedModel) -> str | None:
    """Return the class of a layer that forgets its state in each pass of several tokens; `None` if a model has none."""
    names = (type(module).__name__ for module in model.modules())
    return next((name for name in names if name in _LAYERS_THAT_BEGIN_ANEW), None)


def warn_beyond_context(model: PreTrainedModel, num_tokens: int, stacklevel: int) -> None:
    """Warn of a prompt that is longer than the model's context, before the time for it is spent."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and num_tokens > context:
        warnings.warn(
            f"The prompt has {num_tokens:,} tokens, and the model's context is {context:,}: answers may be nonsense. "
            "Cut the prompt.",
            stacklevel=stacklevel,
        )


def _checked_chunk(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, chunk_size: int
) -> int:
    """Check the arguments of `prefill`, and return the size of a chunk."""
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


class _Checkpoint:
    """The file in which a cache is kept while its prompt is read, and the times at which it is written."""

    def __init__(self, path: str | os.PathLike[str], model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache):
        if not isinstance(cache, HybridCache):
            raise TypeError(f"checkpoint= needs a cache that has a file, a HybridCache, got {type(cache).__name__}.")
        self._path = Path(path).absolute()  # the working directory may change
        self._model, self._token_ids, self._cache = model, token_ids, cache
        self._next = time.monotonic() + _LEAST_SECONDS

    def take_up(self) -> None:
        """Fill the cache, which must be empty, with what is in the file, if there is one."""
        are_there = self._told(self._path.exists())
        if not any(are_there):
            return
        if not all(are_there):
            raise CacheFileError(
                self._path,
                f"is there for {sum(are_there)} of the {len(are_there)} processes that share the cache: give all of "
                "them the same file, or none.",
            )
        if held := self._cache.get_seq_length():
            raise ValueError(
                f"{self._path} is there and the cache holds {held:,} tokens: pass a new cache to go on from the file, "
                "or another file."
            )
        model = self._model
        try:
            fill_from_file(self._cache, self._path, model.config, model.device, self._token_ids)
        except CacheFileError as error:
            way_out = "To read the prompt anew, remove the file or name another."
            raise CacheFileError(self._path, f"{error.reason} {way_out}") from error

    def after_pass(self, reached: int, is_last: bool) -> None:
        """Write the cache if it is time, for any process that shares it; the old file stays until this is complete."""
        start = time.monotonic()
        if not any(self._told(is_last or start >= self._next)):
            return
        self._cache.save(self._path, self._token_ids[:, :reached])
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, _REST * (end - start))

    def _told(self, answer: bool) -> list[bool]:
        """Return the answers of all processes that share the cache, in the order of ranks."""
        peers = contents_of(self._cache).stores.peers
        return [answer] if peers is None else [bool(each) for each in peers.numbers(int(answer))]


class PrefillProgress:
    """
    A progress bar on a terminal or in a notebook. Elsewhere lines on standard error: after half a minute, then every
    minute, and at the end; none for a prompt that is read within half a minute.

    Args:
        start: tokens that are there already.
        end: of all that are read.
        is_shown: whether anything is shown.
        clock: seconds.
    """

    def __init__(self, start: int, end: int, is_shown: bool, clock: Callable[[], float] = time.monotonic):
        self._end, self._clock = end, clock
        # So many tokens are there at the beginning and after each chunk, and the times of these.
        self._reached, self._times = [start], [clock()]
        self._bar = tqdm(
            total=end,
            initial=start,
            desc="prompt",
            unit=" tokens",
            disable=None if is_shown else True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} tokens, {rate_noinv_fmt}{postfix}",
        )
        # tqdm disables itself where it finds no terminal.
        self._has_lines = is_shown and self._bar.disable
        self._chunk_of_last_line, self._next_line = 0, self._times[0] + _FIRST_SECONDS

    def reach(self, tokens: int) -> None:
        """Show that so many tokens are read."""
        now = self._clock()
        self._bar.update(tokens - self._reached[-1])
        self._reached.append(tokens)
        self._times.append(now)
        left = duration_text(seconds_left(self._reached, self._times, self._end))
        self._bar.set_postfix_str(f"{left} left")
        if not self._has_lines:
            return
        if tokens == self._end:
            if (seconds := now - self._times[0]) >= _FIRST_SECONDS:
                _print(f"all {tokens:,} tokens are read in {duration_text(seconds)}, {self._rate_since(0)}")
        elif now >= self._next_line:
            rate = self._rate_since(self._chunk_of_last_line)
            _print(f"{tokens:,} of {self._end:,} tokens, {rate}, {left} left")
            self._chunk_of_last_line, self._next_line = len(self._times) - 1, now + _FOLLOWING_SECONDS

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _rate_since(self, chunk: int) -> str:
        rate = (self._reached[-1] - self._reached[chunk]) / (self._times[-1] - self._times[chunk])
        return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"


def seconds_left(reached: Sequence[int], times: Sequence[float], end: int) -> float:
    """
    Estimate the seconds for the rest of a prompt from those of its chunks so far.

    A token takes longer the more there are before it: tokens from s to e take `a * (e - s) + b * (e² - s²) / 2`. The
    least squares of the chunks so far tell a and b; the first one warms up and does not count if there are others.

    Args:
        reached: tokens that are there at the beginning, and after each chunk; at least one.
        times: of these, in seconds.
        end: tokens of the whole prompt.
    """
    tokens = np.array([*reached, end], dtype=np.float64)
    work = np.diff([tokens, tokens**2 / 2]).T  # of each chunk and of the rest: tokens, and pairs with one before
    first = 1 if len(times) > 2 else 0
    chunks, left, seconds = work[first:-1], work[-1], np.diff(times)[first:]
    if len(chunks) > 1:
        costs = np.linalg.lstsq(chunks, seconds, rcond=None)[0]
        if costs.min() >= 0:
            return float(left @ costs)
    return float(left[0] * seconds.sum() / chunks[:, 0].sum())


def _print(line: str) -> None:
    """Print a line; where nobody reads any more, the prompt is read all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(f"prompt: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def finishing() -> Iterator[Callable[[], bool]]:
    """
    Let Ctrl-C end the block at the next safe moment, and raise `KeyboardInterrupt` afterwards.

    Gives what tells whether it was pressed. Pressed again it does what it did before. On threads that get no signals,
    and where something else takes them, nothing changes.
    """
    was_pressed = False
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if was_pressed:
        raise KeyboardInterrupt
