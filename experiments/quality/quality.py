"""
The loss of quality by few-bit keys and values: caches against full precision, with real text.

Perplexity: the first half of a window is prefilled, the second follows in steps of 16 given tokens, so that the stored
form is what is attended to. Next to the perplexity of the scored tokens stand the mean KL divergence of the next-token
distributions from those of full precision, in nats, and the share of places where both have the same most likely token.
Pass key: how often five digits that a long text hides are found again; needles: how many of ten in one text.
Reparametrized: perplexity in one window, with other weights for the same function.

The prefill runs once, in full precision, and each cache is filled with its keys and values; in models with sliding
windows each cache has its own. What a cache holds is measured after the steps of the largest window.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from experiments.common.harness import finish, table
from experiments.common.options import plain_parser
from experiments.common.texts import TEXTS, english_ids
from experiments.quality import retrieval
from experiments.quality.perplexity import score_window
from experiments.quality.quality_caches import CACHES, REFERENCE, STEP_TOKENS, peer_versions, reasons_to_skip
from experiments.quality.reparametrizations import REPARAMETRIZATIONS, reparametrized, require_same_function
from hf_hybrid_cache.models import load

MEASURES = ("perplexity", "passkey", "needles", "reparametrized")
SMOKE = {"windows": [256], "window": 256, "reparametrizations": ["values permuted"], "contexts": [768], "depths": 1}


@dataclass(frozen=True)
class Subject:
    """
    The model, tokenizer and text of the measurements.

    Attributes:
        model: of any decoder architecture with full attention.
        tokenizer: of the model.
        start: [1, tokens], what its tokenizer puts before a text; often nothing.
        text: [1, tokens]
        names: keys of `CACHES`, the reference first.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    start: torch.Tensor
    text: torch.Tensor
    names: list[str]

    def stretches(self, num_tokens: int, count: int) -> list[torch.Tensor]:
        """Parts of the text, spread over it, `[1, num_tokens]` each."""
        length = num_tokens - self.start.shape[1]
        gap = (self.text.shape[1] - length) // count
        parts = [self.text[:, index * gap : index * gap + length] for index in range(count)]
        return [torch.cat([self.start, part], dim=1) for part in parts]


def measure_perplexity(subject: Subject, windows: list[int], texts: int, scored_tokens: int) -> list[dict[str, Any]]:
    cells = []
    for window in windows:
        scored = min(scored_tokens, window - window // 2)
        for text, ids in enumerate(subject.stretches(window + 1, texts)):
            cell = score_window(subject.model, ids, scored, subject.names)
            print(f"\nwindow of {window:,} tokens, text {text + 1}: {scored:,} tokens scored after {window // 2:,}")
            show(cell)
            cells.append({"measure": "perplexity", "window_tokens": window, "text": text, **cell})
    return cells


def show(cell: dict[str, Any]) -> None:
    """Print what `score_window` returns."""
    rows = cell["caches"]
    figures = ("perplexity", "increase", "kl_nats", "same_top_token", "share_of_bfloat16", "seconds")
    print(table("cache", {figure: {name: row[figure] for name, row in rows.items()} for figure in figures}))


def measure_reparametrized(
    subject: Subject, reparametrizations: list[str], window: int, scored_tokens: int
) -> list[dict[str, Any]]:
    scored = min(scored_tokens, window - window // 2)
    ids = subject.stretches(window + 1, 1)[0]
    cells = []
    with torch.inference_mode():
        expected = subject.model(ids[:, :512]).logits
    for name in reparametrizations:
        with reparametrized(subject.model, name):
            with torch.inference_mode():
                difference = require_same_function(expected, subject.model(ids[:, :512]).logits)
            cell = score_window(subject.model, ids, scored, subject.names)
        print(f"\n{name}: window of {window:,} tokens, {scored:,} scored; logits differ by up to {difference:.1e}")
        show(cell)
        told = {"reparametrization": name, "largest_difference_of_logits": difference, "window_tokens": window}
        cells.append({"measure": "reparametrized", **told, **cell})
    return cells


def measure_retrieval(subject: Subject, measure: str, contexts: list[int], depths: int) -> list[dict[str, Any]]:
    cells = []
    for context in contexts:
        at_once = measure == "needles"
        cell = retrieval.retrieve(subject, context, len(retrieval.OWNERS) if at_once else depths, at_once)
        print(f"\n{measure}, {context:,} tokens: full precision finds {cell['counted']}, and of those")
        print(table("cache", {"found": cell["found"]}))
        cells.append({"measure": measure, **cell})
    return cells


def summary(cells: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """Summarize each cache: means over the largest window, and all pass keys."""
    kinds = {measure: [cell for cell in cells if cell["measure"] == measure] for measure in MEASURES}
    largest = max((cell["window_tokens"] for cell in kinds["perplexity"]), default=0)
    windows = [cell for cell in kinds["perplexity"] if cell["window_tokens"] == largest]

    rows = [(windows, key) for key in ("increase", "kl_nats", "share_of_bfloat16") if windows]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {key: round(fmean(cell["caches"][name][key] for cell in group), 5) for group, key in rows}
        for measure in ("passkey", "needles"):
            if keys := kinds[measure]:
                shares = sum(cell["found"][name] for cell in keys), sum(cell["counted"] for cell in keys)
                found[name][measure] = "{}/{}".format(*shares)
        if changed := kinds["reparametrized"]:
            found[name]["highest_kl_nats_reparametrized"] = max(cell["caches"][name]["kl_nats"] for cell in changed)
    return found


def read_text(tokenizer: PreTrainedTokenizerBase, name: str, file: Path | None) -> torch.Tensor:
    if file is None:
        return english_ids(tokenizer, None, name)
    return tokenizer(file.read_text(), add_special_tokens=False, return_tensors="pt", verbose=False).input_ids


def parse_options() -> argparse.Namespace:
    parser = plain_parser("quality", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--model-name", help="what a record calls the model (default: as --model, of a folder its name)"
    )
    parser.add_argument("--text", choices=TEXTS, default=next(iter(TEXTS)), help="what is read")
    parser.add_argument("--text-file", type=Path, help="what is read instead")
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, default=list(CACHES), metavar="NAME", help=f"of {', '.join(CACHES)}"
    )
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--texts", type=int, default=1, help="windows of each length, at different places")
    parser.add_argument("--scored-tokens", type=int, default=512, help="of the second half of a window, at most")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="that hide pass keys")
    parser.add_argument("--depths", type=int, default=10, help="pass keys for each context")
    parser.add_argument(
        "--reparametrizations", nargs="+", choices=REPARAMETRIZATIONS, default=list(REPARAMETRIZATIONS), metavar="NAME"
    )
    parser.add_argument("--window", type=int, default=4096, help="of reparametrized models")
    parser.add_argument("--smoke", action="store_true", help="little of everything, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    return arguments


def prepare(arguments: argparse.Namespace) -> tuple[Subject, dict[str, str]]:
    """Load the subject, and return the reasons why caches are left out, by name."""
    model, tokenizer = load(arguments.model, getattr(torch, arguments.dtype), "cpu")
    if tokenizer is None:
        sys.exit(f"{arguments.model} has no tokenizer.")
    others = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {DynamicLayer.__name__}
    if others and {"passkey", "needles"}.intersection(arguments.measures):
        sys.exit(
            f"{arguments.model} has layers of type {', '.join(sorted(others))}, whose states cannot be handed from one "
            "cache to another: pass keys and needles cannot be measured. Choose other --measures."
        )
    longest = max([*arguments.windows, *arguments.contexts])
    if longest > model.config.max_position_embeddings:
        sys.exit(f"{arguments.model} has {model.config.max_position_embeddings:,} positions, not {longest:,}.")
    text = read_text(tokenizer, arguments.text, arguments.text_file)
    if text.shape[1] <= longest:
        sys.exit(f"The text has {text.shape[1]:,} tokens and {longest + 1:,} are needed.")
    names = [REFERENCE, *(name for name in CACHES if name in arguments.caches and name != REFERENCE)]
    skipped = reasons_to_skip(model, text, names[1:])
    start = torch.tensor([tokenizer("").input_ids], dtype=torch.long)
    return Subject(model, tokenizer, start, text, [name for name in names if name not in skipped]), skipped


def main() -> None:
    arguments = parse_options()
    subject, skipped = prepare(arguments)
    for name, reason in skipped.items():
        print(f"left out: {name}: {reason.splitlines()[0]}")
    cells = []
    if "perplexity" in arguments.measures:
        cells += measure_perplexity(subject, arguments.windows, arguments.texts, arguments.scored_tokens)
    for measure in ("passkey", "needles"):
        if measure in arguments.measures:
            cells += measure_retrieval(subject, measure, arguments.contexts, arguments.depths)
    if "reparametrized" in arguments.measures:
        cells += measure_reparametrized(
            subject, arguments.reparametrizations, arguments.window, arguments.scored_tokens
        )
    record = {
        "model": arguments.model_name or Path(arguments.model).name,
        "dtype": arguments.dtype,
        "text": arguments.text_file.name if arguments.text_file else arguments.text,
        "step_tokens": STEP_TOKENS,
        "fill": "one update a layer, with the keys and values of a full-precision prefill in chunks",
        "passkey": {"needle": retrieval.NEEDLE, "question": retrieval.QUESTION, "answer": retrieval.ANSWER},
        "peers": peer_versions(),
        "left_out": skipped,
        "cells": cells,
    }
    finish("quality", record, summary(cells, subject.names), arguments.out)


if __name__ == "__main__":
    main()
