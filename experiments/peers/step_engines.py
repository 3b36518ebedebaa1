"""Rows beside llama.cpp: options to choose them, our models and caches, and steps that time themselves."""

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from experiments.common.decoding import unchosen_bytes, weight_bytes
from experiments.common.reading import CacheEngine
from experiments.common.synthetic import filled_cache
from experiments.common.timing import seconds_of
from experiments.experts.random_experts import cut_config, has_experts, random_model, twin_of
from experiments.peers.gguf_files import gguf_file
from experiments.peers.llama_process import add_python_options, reasons_to_leave_out
from experiments.peers.step_rows import LIBRARIES, OURS, Row
from hf_hybrid_cache import (
    DynamicHybridCache,
    QuantizedHybridCache,
    fuse_decode,
    get_num_threads,
    move_experts_to_host,
    quantize_weights,
    set_num_threads,
)
from hf_hybrid_cache.models import load

DTYPE = torch.bfloat16
# A shape that is cut to so many layers, with random weights.
EXPERTS = {"qwen3-30b-a3b-4-layers-random": ("Qwen/Qwen3-30B-A3B", 4)}


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


def row_cache(row: Row, model: PreTrainedModel, tokens: int) -> Cache:
    """Make the cache of a row, with random keys and values."""
    return filled_cache(partial(empty_cache, row), model, tokens)


@dataclass(frozen=True)
class Setup:
    """The rows that can be measured here, and all that their engines need."""

    model: PreTrainedModel
    ours: OurModels
    rows: list[Row]
    files: Mapping[int, Path]
    pythons: Mapping[str, str]
    left_out: Mapping[str, str]


def add_row_options(
    parser: argparse.ArgumentParser, models: Iterable[str], rows: Mapping[str, Row], rounds: int
) -> None:
    """Add options for the model, the rows, and with what they run."""
    parser.add_argument("--model", choices=models, default=next(iter(models)))
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), metavar="NAME", help=", ".join(rows))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=get_num_threads())
    add_python_options(parser)


def set_up(arguments: argparse.Namespace, rows: Mapping[str, Row]) -> Setup:
    """Load the model, and write its files, for the chosen rows that can be measured here."""
    name = arguments.model
    pythons = {library: getattr(arguments, library) for library in LIBRARIES}
    left_out = reasons_to_leave_out(pythons)
    for engine, reason in left_out.items():
        print(f"{engine} is left out: {reason}")
    chosen = [row for row in rows.values() if row.name in arguments.rows and row.engine not in left_out]
    if not chosen:
        sys.exit("Nothing is left to measure.")
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    model = random_model(cut_config(*EXPERTS[name]), DTYPE) if name in EXPERTS else load(name, DTYPE, "cpu")[0]
    widths = sorted({row.weight_bits for row in chosen if row.engine in LIBRARIES})
    files = {bits: gguf_file(name, bits, model) for bits in widths}
    return Setup(model, OurModels(model, chosen), chosen, files, pythons, left_out)
