"""
The exit of short programs: soon after the first tokens, while kernels are compiled or loaded in the background.

Each run is a process of its own that makes a small random model, gives it a prompt with a cache of this package, and
ends a moment later, in one of several ways. Half of them have one processor; some find no compiled kernel and compile.
A run is good if the process ends with the code that its program asks for. How long it takes from its last line to its
end is what it waits for threads.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.harness import finish
from experiments.common.options import plain_parser
from experiments.common.told_process import HERE

_BEGINNING = """
import os, sys, threading, time
if sys.argv[1] == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_hybrid_cache import DynamicHybridCache, QuantizedHybridCache, quantize_weights
from hf_hybrid_cache.cache_argument import cache_argument
config = LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)
model = LlamaForCausalLM(config)
"""
USES = {
    "attention": "cache = DynamicHybridCache(config)",
    "codes": "cache = QuantizedHybridCache(config, bits=4)",
    "weights": "cache = DynamicHybridCache(config); quantize_weights(model, 4)",
}
_PROMPT = """
with torch.no_grad():
    model(torch.arange(70)[None], **cache_argument(cache))
if sys.argv[2] == "compiled":
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join()
else:
    time.sleep(float(sys.argv[2]))
print(time.time(), flush=True)
"""
# The last line and the exit status of a program, by the way in which it ends.
ENDS = {"its last line": ("", 0), "sys.exit": ("sys.exit(3)", 3), "an exception": ("raise ValueError('on purpose')", 1)}


def run(use: str, end: str, is_pinned: bool, seconds: float | None, kernels: Path | None = None) -> dict[str, Any]:
    """
    Run one program that ends some seconds after its first tokens, or when all is compiled; return how it ended.

    kernels: a folder for compiled ones; `None` for where they are kept anyway.
    """
    last, expected = ENDS[end]
    command = [sys.executable, "-c", _BEGINNING + USES[use] + _PROMPT + last]
    done = subprocess.run(
        [*command, "pinned" if is_pinned else "free", "compiled" if seconds is None else str(seconds)],
        cwd=HERE,
        env=os.environ | ({} if kernels is None else {"NUMBA_CACHE_DIR": str(kernels)}),
        capture_output=True,
        text=True,
        check=False,
    )
    ended = time.time()
    is_good = done.returncode == expected and bool(done.stdout)
    return {
        "use": use,
        "end": end,
        "is_pinned": is_pinned,
        "seconds_after_tokens": seconds,
        "is_good": is_good,
        "exit_status": done.returncode,
        "seconds_to_end": ended - float(done.stdout) if done.stdout else None,
        "error": None if is_good else done.stderr[-500:],
    }


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize runs by warm or cold kernels, and one or all processors."""
    groups = defaultdict(list)
    for cell in cells:
        groups[f"{cell['kernels']}, {'one processor' if cell['is_pinned'] else 'all processors'}"].append(cell)
    answers = {}
    for name, group in groups.items():
        seconds = [cell["seconds_to_end"] for cell in group if cell["seconds_to_end"] is not None]
        answers[name] = {
            "runs": len(group),
            "bad": sum(not cell["is_good"] for cell in group),
            "median_seconds_to_end": round(statistics.median(seconds), 2),
            "most_seconds_to_end": round(max(seconds), 2),
        }
    return answers


def main() -> None:
    parser = plain_parser("short_programs", __doc__)
    parser.add_argument("--warm", type=int, default=300, help="runs with compiled kernels (default: %(default)s)")
    parser.add_argument("--cold", type=int, default=48, help="runs that compile (default: %(default)s)")
    parser.add_argument("--uses", choices=USES, nargs="+", default=list(USES))
    parser.add_argument("--longest", type=float, default=1.0, help="seconds after the first tokens, at most")
    options = parser.parse_args()
    moment = random.Random(0)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for use in options.uses if options.warm else ():
            run(use, "its last line", False, None)
        for kernels, count in (("warm", options.warm), ("cold", options.cold)):
            for number in range(count):
                use = options.uses[number % len(options.uses)]
                end = list(ENDS)[number // len(options.uses) % len(ENDS)]
                is_pinned = bool(number // (len(options.uses) * len(ENDS)) % 2)
                place = None if kernels == "warm" else Path(folder) / str(number)
                cells.append({"kernels": kernels} | run(use, end, is_pinned, moment.uniform(0, options.longest), place))
                if not cells[-1]["is_good"]:
                    print(f"bad: {cells[-1]}", flush=True)
    answers = summary(cells)
    for name, answer in answers.items():
        print(
            f"{name}: {answer['bad']} of {answer['runs']} ended badly; {answer['median_seconds_to_end']} s from the "
            f"last line to the end, {answer['most_seconds_to_end']} at most"
        )
    record = {"longest_seconds_after_tokens": options.longest, "answers": answers, "cells": cells}
    finish("short_programs", record, answers, options.out)


if __name__ == "__main__":
    main()
