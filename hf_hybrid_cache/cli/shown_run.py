"""One timed generation whose prefill is shown, on a terminal."""

from collections.abc import Callable

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .sampling import GREEDY, Sampling
from .terminal import prefill_bar
from .timed_run import Run, timed_generate


def shown_run(
    notes: Console,
    title: str,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    max_new_tokens: int,
    prefill_chunk_size: int,
    on_token: Callable[[int], None] | None = None,
    sampling: Sampling = GREEDY,
) -> Run:
    """As `timed_generate`, with a bar called `title` of what the cache does not hold yet."""
    with prefill_bar(notes, title, input_ids.shape[1] - 1 - cache.get_seq_length()) as bar:

        def on_each_token(token: int) -> None:
            bar.stop()  # before the answer is written where the bar was
            if on_token:
                on_token(token)

        return timed_generate(
            model,
            input_ids,
            cache,
            max_new_tokens,
            prefill_chunk_size,
            on_prefill=bar.advance,
            on_token=on_each_token,
            sampling=sampling,
        )
