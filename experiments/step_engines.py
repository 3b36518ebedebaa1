"""Our rows of `experiments.whole_step`, and transformers' own: models, caches, and steps that time themselves."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.decoding import weight_bytes
from experiments.reading import CacheEngine
from experiments.step_rows import Row
from experiments.synthetic import fill
from experiments.timing import seconds_of
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache, quantize_weights

DTYPE = torch.bfloat16


class OurModels:
    """A model with tied embeddings and weights of each width, and the bytes of these that a token reads."""

    def __init__(self, model: PreTrainedModel, widths: Iterable[int]):
        self.by_bits = {16: model}
        self.weight_bytes = {16: weight_bytes(model)}
        for bits in sorted({*widths} - {16}):
            coded = copy.deepcopy(model)
            report = quantize_weights(coded, bits, head_bits=bits)
            self.by_bits[bits] = coded
            self.weight_bytes[bits] = report.coded_bytes + report.other_bytes


class OurEngine:
    """
    Args:
        models: of which the row's is taken.
        row: of ours, or transformers' own.
        cache: filled; other rows may attend to it too.
    """

    library = None

    def __init__(self, models: OurModels, row: Row, cache: Cache):
        self._engine = CacheEngine(models.by_bits[row.weight_bits], cache)
        self._weight_bytes = models.weight_bytes[row.weight_bits]

    def step(self, token: int) -> float:
        """Seconds that one more token takes."""
        return seconds_of(partial(self._engine.step, token))

    @property
    def holds(self) -> dict[str, Any]:
        return {"weight_bytes": self._weight_bytes, "kv_bytes": self._engine.kv_bytes()}

    def close(self) -> None:
        """Nothing to end."""


def filled_cache(row: Row, config: LlamaConfig, tokens: int) -> Cache:
    """A row's cache, with random keys and values."""
    cache: Cache
    if row.engine == "stock":
        cache = DynamicCache(config=config)
    elif row.kv_bits == 16:
        cache = DynamicHybridCache(config)
    else:
        cache = QuantizedHybridCache(config, bits=row.kv_bits)
    fill(cache, config, tokens, DTYPE, chunk=8192)
    return cache
