"""
Perplexity and divergence from full precision with caches that store a context in few bits.

The first half of a window is prefilled, once and in full precision, and each cache is filled with its keys and values.
The second half follows in steps of given tokens, so that what is attended to is the stored form. All caches take each
step side by side, so that no probabilities need be kept.
"""

import math
import time
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from experiments.common.decoding import prefill
from experiments.quality.quality_caches import CACHES, REFERENCE, STEP_TOKENS, bfloat16_bytes, filled, stored_bytes
from hf_hybrid_cache.cache_argument import cache_argument


def divergence(log_probs: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """From `expected`, of log-probabilities `[tokens, vocabulary]`: means over the tokens."""
    return {
        "kl_nats": float((expected.exp() * (expected - log_probs)).sum(-1).mean()),
        "same_top_token": float((expected.argmax(-1) == log_probs.argmax(-1)).float().mean()),
    }


class Score:
    """The scores of one cache, added up over the steps."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.seconds = 0.0
        self._tokens = self._same = 0
        self._loss = self._divergence = 0.0

    def step(self, model: PreTrainedModel, piece: torch.Tensor) -> torch.Tensor:
        """Logarithms of the next-token probabilities, `[tokens, vocabulary]`."""
        start = time.perf_counter()
        logits = model(piece, **cache_argument(self.cache)).logits[0]
        self.seconds += time.perf_counter() - start
        return logits.float().log_softmax(-1)

    def add(self, log_probs: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """
        Count one step.

        Args:
            log_probs: [tokens, vocabulary]
            expected: as `log_probs`, with full precision.
            targets: [tokens], what follows in the text.
        """
        self._tokens += len(targets)
        self._loss -= float(log_probs.gather(1, targets[:, None]).sum(dtype=torch.float64))
        self._divergence += float((expected.exp() * (expected - log_probs)).sum(dtype=torch.float64))
        self._same += int((log_probs.argmax(-1) == expected.argmax(-1)).sum())

    def report(self) -> dict[str, Any]:
        return {
            "perplexity": math.exp(self._loss / self._tokens),
            "kl_nats": self._divergence / self._tokens,
            "same_top_token": self._same / self._tokens,
            "seconds": self.seconds,
            "stored_bytes": stored_bytes(self.cache),
        }


@torch.inference_mode()
def score_window(model: PreTrainedModel, ids: torch.Tensor, scored_tokens: int, names: list[str]) -> dict[str, Any]:
    """
    Perplexity, divergence and what is held, by cache.

    Args:
        model: of any decoder architecture with full attention.
        ids: [1, window + 1]; the token after the window is only predicted.
        scored_tokens: of the second half, from its start.
        names: keys of `CACHES`, the reference first.
    """
    half = ids.shape[1] // 2
    prefilled = DynamicCache(config=model.config)
    # States of sliding windows cannot be handed over: then each cache has its own prefill, in one pass.
    is_shared = all(type(layer) is DynamicLayer for layer in prefilled.layers)
    if is_shared:
        prefill(model, prefilled, ids[:, :half])
    scores = {}
    for name in names:
        start = time.perf_counter()
        cache = CACHES[name](model.config)
        if is_shared:
            filled(cache, prefilled)
        else:
            prefill(model, cache, ids[:, :half], half)
        scores[name] = Score(cache)
        scores[name].seconds = time.perf_counter() - start
    del prefilled
    end = half + scored_tokens
    steps = zip(ids[:, half:end].split(STEP_TOKENS, 1), ids[0, half + 1 : end + 1].split(STEP_TOKENS), strict=True)
    for piece, targets in steps:
        expected = scores[REFERENCE].step(model, piece)
        for name, score in scores.items():
            score.add(expected if name == REFERENCE else score.step(model, piece), expected, targets)
    reports = {name: score.report() for name, score in scores.items()}
    full_size = bfloat16_bytes(scores[REFERENCE].cache)
    for report in reports.values():
        report["increase"] = report["perplexity"] / reports[REFERENCE]["perplexity"] - 1
        report["share_of_bfloat16"] = report["stored_bytes"] / full_size
    return {"stored_tokens": end, "scored_tokens": scored_tokens, "caches": reports}
