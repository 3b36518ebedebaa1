"""Engines that read on in a text after a prompt, compared with float32."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import prefill
from experiments.quality.quality_caches import filled, stored_bytes
from hf_hybrid_cache.cache_argument import cache_argument


@dataclass(frozen=True)
class Passage:
    """
    A text to read, and the result of a model in float32.

    Attributes:
        prompt: token ids.
        following: the token ids after it, one a step.
        prefilled: keys and values of the prompt, in the type that was asked for.
        expected: [len(following), vocabulary], logits after each of `following`.
    """

    prompt: list[int]
    following: list[int]
    prefilled: Cache
    expected: torch.Tensor


@torch.inference_mode()
def read_passage(model: PreTrainedModel, ids: torch.Tensor, context: int, dtype: torch.dtype) -> Passage:
    """
    Read a text.

    Args:
        model: in float32.
        ids: [1, tokens], prompt and following.
        context: tokens of the prompt.
        dtype: of the keys and values to keep.
    """
    cache = DynamicCache(config=model.config)
    prompt, following = ids[:, :context], ids[:, context:]
    prefill(model, cache, prompt)
    prefilled = filled(DynamicCache(config=model.config), cache, dtype)
    expected = model(following, **cache_argument(cache)).logits[0]
    return Passage(prompt[0].tolist(), following[0].tolist(), prefilled, expected)


class Engine(Protocol):
    """An engine that has read a prompt."""

    def step(self, token: int) -> torch.Tensor | np.ndarray:
        """Logits after one more token, `[vocabulary]`."""

    def kv_bytes(self) -> int:
        """Return the bytes of the keys and values of all tokens."""


class CacheEngine:
    """A model with a cache that has the keys and values of a prompt."""

    def __init__(self, model: PreTrainedModel, cache: Cache):
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        return self._model(torch.tensor([[token]]), **cache_argument(self._cache)).logits[0, -1]

    def kv_bytes(self) -> int:
        return stored_bytes(self._cache)


class Reader:
    """Lets an engine read on; `cosines` has the similarity of its logits to the expected ones at each comparison."""

    def __init__(self, engine: Engine, passage: Passage):
        self.engine = engine
        self.cosines: list[float] = []
        self._logits: torch.Tensor | np.ndarray | None = None
        self._left = zip(passage.following, passage.expected, strict=True)

    def step(self) -> None:
        """Read one token."""
        token, self._expected = next(self._left)
        self._logits = self.engine.step(token)

    def compare(self) -> None:
        """Compare the logits of the last step, if there was one."""
        if self._logits is None:
            return
        logits = torch.as_tensor(self._logits).float()
        self.cosines.append(float(torch.cosine_similarity(logits, self._expected, dim=0)))
