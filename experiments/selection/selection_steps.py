"""
A decode step of a whole model at a long context with top-p page selection: seconds, and the loss of quality.

Transformers' DynamicCache, ours in full precision and ours in few bits, each of ours with and without a selection,
take turns. A timed token follows an untimed one of the same cache, as in decoding. A model with a tokenizer gets the
keys and values of real text, in windows as long as it was trained for, and reads on in the last one; divergence is from
the same cache without a selection. A model with random weights gets random keys, of which the pages that matter are
turned towards its queries: the share that is read is then by construction.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.options import experiment_parser
from experiments.common.synthetic import fill, kv_bytes
from experiments.common.timing import in_turns, medians
from experiments.quality.joined_windows import Continuation, fill_with_windows
from experiments.quality.perplexity import divergence
from experiments.quality.quality_caches import filled, stored_bytes
from experiments.selection.selection_speed import in_part
from experiments.selection.turned_keys import HIGHER, turn_keys
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, Selection, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
from hf_hybrid_cache.models import load

STOCK, FULL = "DynamicCache", "bfloat16"
TOKEN = 1  # the one that is given where there is no text


def makers(bits: int, top_p: float | None, most: float | None) -> dict[str, Callable[..., Cache]]:
    """The caches, by name: each that reads a part after the one that reads all."""
    quantized, selection = f"{bits} bits", Selection(top_p, most)
    few_bits = partial(QuantizedHybridCache, bits=bits)
    return {
        STOCK: lambda config: DynamicCache(config=config),
        FULL: DynamicHybridCache,
        in_part(FULL): partial(DynamicHybridCache, selection=selection),
        quantized: few_bits,
        in_part(quantized): partial(few_bits, selection=selection),
    }


class GivenDecoder:
    """
    Decodes given tokens, one a step.

    Attributes:
        log_probs: of the next token after each step, `[vocabulary]`.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, ids: list[int], position: int):
        self.cache = cache
        self.log_probs: list[torch.Tensor] = []
        self._model = model
        self._steps: Iterator[tuple[int, int]] = iter(enumerate(ids, position))

    @torch.inference_mode()
    def step(self) -> None:
        position, token = next(self._steps)
        place = torch.tensor([[position]])
        logits = self._model(torch.tensor([[token]]), position_ids=place, **cache_argument(self.cache)).logits[0, -1]
        self.log_probs.append(logits.float().log_softmax(-1))


def fill_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    caches: dict[str, Cache],
    num_tokens: int,
    steps: int,
    share: float,
) -> Continuation:
    """Give all caches the same states, and return the next tokens."""
    if tokenizer is not None:
        tell = partial(print, flush=True)
        return fill_with_windows(model, tokenizer, list(caches.values()), num_tokens, steps, tell)
    stock, *ours = caches.values()
    assert isinstance(stock, DynamicCache)
    fill(stock, model.config, num_tokens, model.dtype, chunk=8192)
    turn_keys(model, stock, TOKEN, share)
    for cache in ours:
        filled(cache, stock)
    return Continuation([TOKEN] * steps, num_tokens, 0)


def measure(
    decoders: dict[str, GivenDecoder], rounds: int, reader: MemoryReader, is_text: bool
) -> dict[str, dict[str, Any]]:
    """Let all decode in turns; raw samples in seconds, by cache."""
    actions = {name: decoder.step for name, decoder in decoders.items()}

    def prepare(name: str) -> None:
        reader.read()
        actions[name]()

    samples = in_turns(actions, rounds, prepare)
    rows: dict[str, dict[str, Any]] = {}
    for name, seconds in medians(samples).items():
        cache = decoders[name].cache
        rows[name] = {
            "median_seconds": seconds,
            "kv_bytes": stored_bytes(cache),
            "samples_seconds": samples[name],
        }
        of_all = name.removesuffix(in_part(""))
        if of_all == name:
            continue
        assert isinstance(cache, HybridCache)
        read = cache.stats.share_read
        rows[name] |= {"read": sum(read.values()) / len(read), "read_by_layer": list(read.values())}
        if is_text:
            found, expected = (torch.stack(decoders[each].log_probs) for each in (name, of_all))
            rows[name] |= divergence(found, expected)
    return rows


def table(cell: dict[str, Any]) -> list[str]:
    """Return a Markdown table of each cache's time, and of its speedup over transformers' own."""
    rows = cell["caches"]
    has_text = any("kl_nats" in row for row in rows.values())
    titles = ["cache", "read", "ms a token", "of DynamicCache's speed", "of the same that reads all"]
    titles += ["KL, nats", "same top token"] if has_text else []
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in rows.items():
        seconds, whole = row["median_seconds"], rows[name.removesuffix(in_part(""))]["median_seconds"]
        values = [f"{row.get('read', 1):.0%}", f"{seconds * 1e3:.0f}"]
        values += [f"{rows[STOCK]['median_seconds'] / seconds:.2f}x", f"{whole / seconds:.2f}x"]
        if has_text:
            values += [f"{row['kl_nats']:.4f}", f"{row['same_top_token']:.0%}"] if "kl_nats" in row else ["", ""]
        lines.append(f"| {' | '.join([name, *values])} |")
    return lines


def require_memory(model: PreTrainedModel, num_tokens: int, bits: int) -> None:
    """Exit where the caches, and the copy that transformers' own makes of a layer, would not fit."""
    assert isinstance(model.config, LlamaConfig)
    size = kv_bytes(model.config, num_tokens, model.dtype)
    needed = int(size * (3 + 2 * (bits + 1) / 16 + 4 / 16 + 2 / model.config.num_hidden_layers))
    available = psutil.virtual_memory().available
    if needed > available:
        sys.exit(
            f"Five caches of {num_tokens:,} tokens need {needed / 2**30:.1f} GiB and {available / 2**30:.1f} are free: "
            "pass shorter --contexts."
        )


def parse_options() -> argparse.Namespace:
    parser = experiment_parser("selection_steps", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16_384, 131_072], help="tokens")
    parser.add_argument("--bits", type=int, choices=[8, 4, 2], default=4)
    parser.add_argument("--weight-bits", type=int, choices=[8, 4], help="of all weights, with every cache")
    parser.add_argument("--top-p", type=float, help="default: as users")
    parser.add_argument("--most", type=float, help="share of the tokens from which on all are read; default: as users")
    parser.add_argument("--share", type=float, default=0.1, help="of the pages that matter, without a text")
    parser.add_argument("--rounds", type=int, default=16, help="tokens timed with each cache")
    return parser.parse_args()


def main() -> None:
    arguments = parse_options()
    model, tokenizer = load(arguments.model, torch.bfloat16, "cpu")
    if arguments.weight_bits:
        quantize_weights(model, arguments.weight_bits, head_bits=arguments.weight_bits)
    reader = MemoryReader(arguments.buffer_mib)
    bandwidth = read_bandwidth(reader)
    cells = []
    # Each counted round, and the one before them, has an untimed step and a timed one.
    steps = 2 * (arguments.rounds + 1)
    for context in arguments.contexts:
        require_memory(model, context, arguments.bits)
        caches = {
            name: make(model.config) for name, make in makers(arguments.bits, arguments.top_p, arguments.most).items()
        }
        going_on = fill_all(model, tokenizer, caches, context - steps, steps, arguments.share)
        decoders = {name: GivenDecoder(model, cache, going_on.ids, going_on.position) for name, cache in caches.items()}
        del caches
        rows = measure(decoders, arguments.rounds, reader, tokenizer is not None)
        cell = {"context_tokens": context, "windows": going_on.windows, "caches": rows}
        del decoders  # before the next ones are filled
        print(f"\n{context:,} tokens\n" + "\n".join(table(cell)) + "\n", flush=True)
        cells.append(cell)
    record = {
        "model": Path(arguments.model).name,
        "dtype": str(model.dtype),
        "weight_bits": arguments.weight_bits,
        "bits": arguments.bits,
        "mass": arguments.top_p,
        "most": arguments.most,
        "share": None if tokenizer else arguments.share,
        "higher": None if tokenizer else HIGHER,
        "read_bytes_per_second": bandwidth,
        "cells": cells,
    }
    name = record["model"] + (f"-{arguments.weight_bits}-bit-weights" if arguments.weight_bits else "")
    folder = arguments.out or records.RESULTS / "selection_steps" / name
    print(f"record: {records.save('selection_steps', record, folder)}")
    print(json.dumps({cell["context_tokens"]: _milliseconds(cell["caches"]) for cell in cells}))


def _milliseconds(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: round(row["median_seconds"] * 1e3, 1) for name, row in rows.items()}


if __name__ == "__main__":
    main()
