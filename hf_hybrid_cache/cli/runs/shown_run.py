"""One timed generation, or a prefill alone, with a bar for the prefill on a terminal."""

import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .answer_options import AnswerOptions
from .prefill_bar import PrefillBar, progress_bars
from .timed_run import Run, timed_generate


def shown_run(
    notes: Console,
    title: str,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    options: AnswerOptions,
    on_token: Callable[[int], None] | None = None,
    fill: Callable[[PrefillBar], None] | None = None,
) -> Run:
    """
    Generate as `timed_generate` does, and show a bar for the tokens that the cache lacks.

    Args:
        notes: shows the bar, on a terminal.
        title: stands before the bar.
        model: of any decoder architecture.
        input_ids: `[1, tokens]`, the prompt.
        cache: empty, or with the first tokens of the prompt.
        options: how the prompt is read and the answer is generated.
        on_token: called with each new token.
        fill: fills the cache with the first tokens of the prompt, from a store; its time is one of the prefill.
    """
    num_cached = cache.get_seq_length()
    with progress_bars(notes, is_transient=True) as bars:
        bar = PrefillBar(bars, title, input_ids.shape[1] - 1 - num_cached, num_cached)

        def on_each_token(token: int) -> None:
            bars.stop()  # before the answer is written where the bar was
            if on_token:
                on_token(token)

        fill_first = None if fill is None else partial(fill, bar)
        return timed_generate(model, input_ids, cache, options, bar.advance, on_each_token, fill_first)


def shown_fill(notes: Console, title: str, num_tokens: int, fill: Callable[[PrefillBar], None]) -> float:
    """
    Fill a cache from a store, and show a bar for the tokens that are read.

    Args:
        notes: shows the bar, on a terminal.
        title: stands before the bar.
        num_tokens: of the prompt.
        fill: fills the cache, and shows it on the bar.

    Returns:
        the seconds that it took.
    """
    start = time.perf_counter()
    with progress_bars(notes, is_transient=True) as bars:
        fill(PrefillBar(bars, title, num_tokens))
    return time.perf_counter() - start
