"""
The loss of quality by top-p page selection, and the share of the tokens that is read, with real text.

A cache with `selection=` against the same cache without, in full precision (16) and in few bits. Divergence: the first
part of a window is prefilled in full precision, then given tokens follow one at a time, as when decoding; the mean KL
divergence of the next-token distributions, in nats, the share of places with the same most likely token, and the share
of the tokens that was read. Rules: the same choice in torch, for the queries of those tokens, and those of others at
as many bytes read (`page_rules`); the divergence, and the share of queries that are left with less than 0.95 of their
attention, in the layer where it is largest. Needles: ten facts, all asked for; pass keys: one at a time.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from experiments.common import records
from experiments.common.decoding import prefill
from experiments.common.texts import TEXTS, english_ids
from experiments.quality import needles, passkey
from experiments.quality.perplexity import Score
from experiments.quality.quality_caches import CACHES, REFERENCE, Caches, filled
from experiments.selection.chosen_pages import Strategy, compare
from experiments.selection.page_rules import OURS, RULES
from hf_hybrid_cache import DynamicHybridCache, HybridCache, QuantizedHybridCache, Selection
from hf_hybrid_cache.models import load

CHUNK = 1024
FULL_BITS = 16  # stand for full precision
MEASURES = ("divergence", "rules", "needles", "passkey")
SMOKE = {"windows": [320], "contexts": [600], "scored_tokens": 4, "depths": 1, "top_p": [0.9]}


def name_of(top_p: float | None) -> str:
    return "all" if top_p is None else f"mass {top_p}"  # the name in committed records


def caches_for(bits: int, top_ps: list[float], most: float) -> Caches:
    """Return the caches by name: full precision, all that is stored, and each `top_p`."""
    makers: dict[str, Callable[..., Cache]] = {REFERENCE: CACHES[REFERENCE]}
    for top_p in (None, *top_ps):
        selection = None if top_p is None else Selection(top_p, most)
        few_bits = partial(QuantizedHybridCache, bits=bits, selection=selection)
        makers[name_of(top_p)] = few_bits if bits < FULL_BITS else partial(DynamicHybridCache, selection=selection)
    return makers


@torch.inference_mode()
def diverge(model: PreTrainedModel, ids: torch.Tensor, scored_tokens: int, caches: Caches) -> dict[str, Any]:
    """
    Return the divergence of each cache that skips pages from the one that reads all.

    Args:
        model: with layers of full attention only.
        ids: [1, window + 1]
        scored_tokens: the last ones of the window, one a step.
        caches: the second one is what the others are compared with.
    """
    start = ids.shape[1] - 1 - scored_tokens
    prefilled = DynamicCache(config=model.config)
    prefill(model, prefilled, ids[:, :start], CHUNK)
    names = list(caches)[1:]
    scores = {name: Score(filled(caches[name](model.config), prefilled)) for name in names}
    del prefilled
    for place in range(start, start + scored_tokens):
        piece, target = ids[:, place : place + 1], ids[0, place + 1 : place + 2]
        expected = scores[names[0]].step(model, piece)
        for name, score in scores.items():
            score.add(expected if name == names[0] else score.step(model, piece), expected, target)
    return {name: {**_few(score.report()), **_read(score.cache)} for name, score in scores.items()}


def _few(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("perplexity", "kl_nats", "same_top_token", "seconds")}


def _read(cache: Cache) -> dict[str, Any]:
    assert isinstance(cache, HybridCache)
    shares = cache.stats.share_read
    return (
        {"read": sum(shares.values()) / len(shares), "read_by_layer": list(shares.values())}
        if shares
        else {"read": 1.0}
    )


def show(title: str, rows: dict[str, dict[str, Any]], columns: dict[str, str]) -> None:
    print(f"\n{title}\n{'':<34}{''.join(f'{column:>14}' for column in columns)}", flush=True)
    for name, row in rows.items():
        print(f"{name:<34}{''.join(f'{row[column]:>14{form}}' for column, form in columns.items())}", flush=True)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: torch.Tensor, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for window in arguments.windows:
        for place in range(arguments.texts):
            first = place * (text.shape[1] - window - 1) // max(1, arguments.texts)
            ids = text[:, first : first + window + 1]
            where = {"window_tokens": window, "text": place}
            if "rules" in arguments.measures:
                cells.append({"measure": "rules", **where, "caches": by_rules(model, ids, arguments)})
            for bits in arguments.bits if "divergence" in arguments.measures else []:
                caches = caches_for(bits, arguments.top_p, arguments.most)
                rows = diverge(model, ids, arguments.scored_tokens, caches)
                show(
                    f"window of {window:,} tokens, text {place + 1}, {bits} bits",
                    rows,
                    {"perplexity": ".4f", "kl_nats": ".5f", "same_top_token": ".1%", "read": ".1%", "seconds": ".1f"},
                )
                cells.append({"measure": "divergence", "bits": bits, **where, "caches": rows})
    for bits in arguments.bits:
        found = retrieved(model, tokenizer, text, arguments, caches_for(bits, arguments.top_p, arguments.most))
        cells += [{"bits": bits, **cell} for cell in found]
    return cells


def by_rules(model: PreTrainedModel, ids: torch.Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare our rule with each `top_p`, and the other rules with the largest one."""
    ways = [Strategy(OURS, top_p) for top_p in arguments.top_p]
    ways += [Strategy(rule, max(arguments.top_p)) for rule in RULES if rule != OURS]
    cache = DynamicCache(config=model.config)
    rows = compare(model, cache, ids, arguments.scored_tokens, ways, CHUNK)
    columns = {"kl_nats": ".5f", "same_top_token": ".1%", "worst_layer": ".2%", "all_layers": ".2%", "pages": ".1%"}
    show(f"by rules, in torch, window of {ids.shape[1] - 1:,} tokens", rows, columns)
    return rows


def retrieved(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: torch.Tensor,
    arguments: argparse.Namespace,
    caches: Caches,
) -> list[dict[str, Any]]:
    """Measure needles and pass keys."""
    cells: list[dict[str, Any]] = []
    start, names = torch.tensor([tokenizer("").input_ids], dtype=torch.long), list(caches)
    for context in arguments.contexts:
        if "needles" in arguments.measures:
            outcome = needles.retrieve(model, tokenizer, start, text, context, names, caches, step_tokens=1)
            print(
                f"\nten facts in {context:,} tokens, of those that full precision finds: {outcome['found']}", flush=True
            )
            cells.append({"measure": "needles", "context_tokens": context, **outcome})
        if "passkey" in arguments.measures:
            prompts = passkey.make_prompts(tokenizer, start, text, context, arguments.depths)
            outcomes = passkey.retrieve(model, tokenizer, prompts, names, caches, step_tokens=1)
            cell = passkey.cell(context, outcomes, names)
            print(f"\npass keys in {context:,} tokens, of those that full precision finds: {cell['found']}", flush=True)
            cells.append(cell)
    return cells


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bits", type=int, nargs="+", choices=[FULL_BITS, 8, 4, 2], default=[FULL_BITS, 4])
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.95, 0.98, 0.99, 0.995])
    parser.add_argument("--most", type=float, default=1.0, help="share of the tokens from which on all are read")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--text", choices=TEXTS, default=next(iter(TEXTS)))
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 4096, 8191])
    parser.add_argument("--texts", type=int, default=1, help="windows of each length, at different places")
    parser.add_argument("--scored-tokens", type=int, default=128, help="the last ones of a window")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192], help="that hide facts")
    parser.add_argument("--depths", type=int, default=10, help="pass keys for each context")
    parser.add_argument("--smoke", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/selection)")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    return arguments


def main() -> None:
    arguments = parse_options()
    model, tokenizer = load(arguments.model, torch.float32, "cpu")
    if tokenizer is None:
        sys.exit(f"{arguments.model} has no tokenizer.")
    others = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {DynamicLayer.__name__}
    if others:
        sys.exit(f"{arguments.model} has layers of type {', '.join(sorted(others))}; all must be of full attention.")
    text = english_ids(tokenizer, None, arguments.text)
    cells = measure(model, tokenizer, text, arguments)
    record = {
        "model": Path(arguments.model).name,
        "bits": arguments.bits,
        "most": arguments.most,
        "text": arguments.text,
        "cells": cells,
    }
    print(f"\nrecord: {records.save('selection', record, arguments.out)}")
    print(json.dumps(summary(cells)))


def table(cells: list[dict[str, Any]], bits: int) -> list[str]:
    """Return a Markdown table of the loss at each `top_p`, and of the share that is read."""
    mine = [cell for cell in cells if cell.get("bits", bits) == bits]
    kinds = {measure: [cell for cell in mine if cell["measure"] == measure] for measure in MEASURES}
    windows = [f"{cell['window_tokens']:,}" for cell in kinds["divergence"]]
    lines = [
        "| top_p | KL, nats | same top token | queries below 0.95, worst layer | needles | pass keys "
        f"| read, of {', '.join(windows)} tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    rules = kinds["rules"][-1]["caches"]
    for name, row in kinds["divergence"][-1]["caches"].items():
        read = [f"{cell['caches'][name]['read']:.0%}" for cell in kinds["divergence"]]
        found = [
            f"{sum(cell['found'][name] for cell in some)} of {sum(cell['counted'] for cell in some)}"
            for some in (kinds["needles"], kinds["passkey"])
        ]
        left = f"{rules[name]['worst_layer']:.1%}" if name in rules else "none"
        values = (f"{row['kl_nats']:.4f}", f"{row['same_top_token']:.0%}", left, *found, ", ".join(read))
        lines.append(f"| {name.removeprefix('mass ')} | {' | '.join(values)} |")
    return lines


def rules_table(cells: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of the loss of rules that read as many bytes, in the longest window."""
    rows = [cell for cell in cells if cell["measure"] == "rules"][-1]["caches"]
    most = max(row["mass"] for row in rows.values())
    lines = [
        "| rule | KL, nats | same top token | queries below 0.95, worst layer | pages read |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if row["mass"] == most:
            ours = OURS if name == name_of(most) else name
            values = (f"{row['kl_nats']:.4f}", f"{row['same_top_token']:.0%}", f"{row['worst_layer']:.1%}")
            lines.append(f"| {ours} | {' | '.join(values)} | {row['pages']:.0%} |")
    return lines


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the longest window and the longest context, by bits and cache."""
    found: dict[str, Any] = {}
    for cell in cells:  # the longest come last
        if cell["measure"] == "divergence":
            for name, row in cell["caches"].items():
                few = {"kl_nats": round(row["kl_nats"], 5), "read": round(row["read"], 3)}
                found.setdefault(f"{cell['bits']} bits, {name}", {}).update(few)
        elif cell["measure"] in ("needles", "passkey"):
            for name, number in cell["found"].items():
                found.setdefault(f"{cell['bits']} bits, {name}", {})[cell["measure"]] = f"{number}/{cell['counted']}"
    return found


if __name__ == "__main__":
    main()
