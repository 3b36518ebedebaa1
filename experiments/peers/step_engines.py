"""Our rows of `experiments.peers.whole_step`, and transformers' own: models, caches, and steps that time themselves."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import unchosen_bytes, weight_bytes
from experiments.common.reading import CacheEngine
from experiments.common.synthetic import fill
from experiments.common.timing import seconds_of
from experiments.experts.random_experts import has_experts, twin_of
from experiments.peers.step_rows import OURS, Row
from hf_hybrid_cache import (
    DynamicHybridCache,
    QuantizedHybridCache,
    fuse_decode,
    move_experts_to_host,
    quantize_weights,
)

DTYPE = torch.bfloat16


class OurModels:
    """
    A model with weights of each width, and with fused steps where a row has them.

    Args:
        model: transformers' own.
        rows: to be measured; others than ours are skipped.

    Attributes:
        weight_bytes: that a token reads, by bits.
        read_share: of all weights.
    """

    def __init__(self, model: PreTrainedModel, rows: Collection[Row]):
        self._models = {("stock", 16): model, ("ours", 16): twin_of(model)}
        if has_experts(model):
            move_experts_to_host(self._models["ours", 16])
        self.weight_bytes = {16: weight_bytes(model)}
        self.read_share = self.weight_bytes[16] / sum(weight.nbytes for weight in model.parameters())
        widths = {engine: {row.weight_bits for row in rows if row.engine == engine} for engine in OURS}
        for bits in sorted(set().union(*widths.values()) - {16}):
            quantized = self._models["ours", bits] = twin_of(model)
            report = quantize_weights(quantized, bits, head_bits=bits)
            quantized_shard = report.quantized_bytes / report.original_bytes
            self.weight_bytes[bits] = (
                report.quantized_bytes + report.other_bytes - unchosen_bytes(model, quantized_shard)
            )
        for bits in widths["fused"]:
            fused = self._models["fused", bits] = twin_of(self._models["ours", bits])
            fuse_decode(fused)

    def of(self, row: Row) -> PreTrainedModel:
        """Return the model of one of our rows, or of transformers' own."""
        return self._models[row.engine, row.weight_bits]


class OurEngine:
    """
    A model with a cache, which times its own steps.

    Args:
        models: of which the row's is taken.
        row: of ours, or transformers' own.
        cache: filled; other rows may attend to it too.
    """

    library = None

    def __init__(self, models: OurModels, row: Row, cache: Cache):
        self._engine = CacheEngine(models.of(row), cache)
        self._weight_bytes = models.weight_bytes[row.weight_bits]

    def step(self, token: int) -> float:
        """Seconds that one more token takes."""
        return seconds_of(partial(self._engine.step, token))

    @property
    def holds(self) -> dict[str, Any]:
        return {"weight_bytes": self._weight_bytes, "kv_bytes": self._engine.kv_bytes()}

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def empty_cache(row: Row, config: PreTrainedConfig) -> Cache:
    """Make the empty cache of a row."""
    if row.engine == "stock":
        return DynamicCache(config=config)
    return DynamicHybridCache(config) if row.kv_bits == 16 else QuantizedHybridCache(config, bits=row.kv_bits)


def filled_cache(row: Row, config: PreTrainedConfig, tokens: int) -> Cache:
    """Make the cache of a row, with random keys and values."""
    cache = empty_cache(row, config)
    fill(cache, config, tokens, DTYPE, chunk=8192)
    return cache
