"""
A context longer than a model was trained for, of real states: windows of real text, one after the other.

Each window is prefilled by itself, so its keys are as far from the last query as the same places of the last window,
whatever lies between. Of all windows but the first the first tokens are left out: a model takes them for the start of
everything. What decodes goes on in the last window.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import prefill
from experiments.common.texts import TEXTS, english_ids
from experiments.quality.quality_caches import states_of

START_TOKENS = 64
_CHUNK = 1024


class Continuation(NamedTuple):
    """
    The next tokens after the windows, and their position.

    Attributes:
        ids: the tokens that follow, `[steps]`.
        position: of the first of them, for the model.
        windows: how many there are.
    """

    ids: list[int]
    position: int
    windows: int


def fill_with_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    caches: list[Cache],
    num_tokens: int,
    steps: int,
    tell: Callable[[str], object],
) -> Continuation:
    """
    Append the states of `num_tokens` tokens, of all windows together, to each of some empty caches.

    Args:
        model: with layers of full attention only.
        tokenizer: of the model.
        caches: to be filled.
        num_tokens: more than `steps`.
        steps: tokens that will follow.
        tell: called with a line about each window.

    Raises:
        ValueError: all texts together have too few tokens.
    """
    longest: int = model.config.max_position_embeddings
    lengths = lengths_of_windows(num_tokens, longest - steps, longest)
    windows = list(itertools.islice(_windows(tokenizer, longest), len(lengths)))
    if len(windows) < len(lengths):
        raise ValueError(f"The texts have {len(windows)} windows of {longest:,} tokens, and {len(lengths)} are needed.")
    for number, (window, length) in enumerate(zip(windows, lengths, strict=True)):
        tell(f"window {number + 1} of {len(windows)}")
        _append(model, window[:, :length], START_TOKENS if number else 0, caches)
    return Continuation(windows[-1][0, length : length + steps].tolist(), length, len(windows))


def lengths_of_windows(num_tokens: int, last: int, longest: int) -> list[int]:
    """The tokens of each window, of which all but the first lose their start; `last` or fewer of the last one."""
    if num_tokens <= last:
        return [num_tokens]
    rest = num_tokens - (last - START_TOKENS)
    lengths = [min(rest, longest)]
    rest -= lengths[0]
    while rest:
        lengths.append(min(rest + START_TOKENS, longest))
        rest -= lengths[-1] - START_TOKENS
    return [*lengths, last]


def _windows(tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[torch.Tensor]:
    """Token ids `[1, length]`, of all texts."""
    for text in TEXTS:
        pieces = english_ids(tokenizer, None, text).split(length, dim=1)
        yield from (piece for piece in pieces if piece.shape[1] == length)


@torch.inference_mode()
def _append(model: PreTrainedModel, ids: torch.Tensor, skipped: int, caches: list[Cache]) -> None:
    """Append the states of a window but for its first tokens."""
    window = DynamicCache(config=model.config)
    prefill(model, window, ids, _CHUNK)
    for layer, (keys, values) in enumerate(states_of(window)):
        for cache in caches:
            cache.update(keys[:, :, skipped:], values[:, :, skipped:], layer)
