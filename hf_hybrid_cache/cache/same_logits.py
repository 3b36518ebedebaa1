"""Sharing the first process' logits with all processes of a group, whose processors round differently."""

from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessor

from ..processes import Peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SameLogits(LogitsProcessor):
    """
    A logits processor that gives all processes of a group the logits of the first one.

    Machines of different kinds, or different numbers of threads, differ in the last bits, and some day these decide
    which token is the likeliest. To sample, call `transformers.set_seed` in all of them besides.

    Args:
        group: of processes that share a cache.

    Raises:
        LostProcessError: another process ended, or did not call it.

    Example:
        >>> cache = DynamicHybridCache(model.config, group=group)
        >>> model.generate(**inputs, cache=cache, logits_processor=[SameLogits(group)])
    """

    def __init__(self, group: "ProcessGroup"):
        self._peers = Peers(group)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._peers.of_the_first(scores)  # type: ignore[return-value]
