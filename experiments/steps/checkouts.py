"""
Seconds a token with this checkout of the package and with another one, such as that of an earlier commit, in turns.

Each has a process of its own with the same model, prompt and options; one computes five steps, of which the first is
not counted, while the other one waits. Greedy tokens of both are compared.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.common.options import experiment_parser
from hf_hybrid_cache import get_num_threads

HERE = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("stepping_process.py")
STEPS = 5


class Decoder:
    """
    A process that decodes with the package of a checkout.

    Args:
        checkout: folder of the package.
        work: see `stepping_process`.
    """

    def __init__(self, checkout: Path, work: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(work)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        if "ready" not in iter(lambda: self._answer().strip(), ""):
            sys.exit(f"The process in {checkout} has ended with status {self._process.wait()}.")
        self.tokens: list[int] = []

    def steps(self) -> list[float]:
        """Return the seconds of all steps but the first."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STEPS}\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        self.tokens = answer["tokens"]
        return answer["seconds"][1:]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def measure(checkouts: dict[str, Path], work: dict[str, Any], rounds: int) -> dict[str, Any]:
    """A cell: raw samples, the median of each, and the median and quartiles of the ratios of all rounds."""
    samples: dict[str, list[list[float]]] = {name: [] for name in checkouts}
    decoders = {name: Decoder(path, work) for name, path in checkouts.items()}
    try:
        for turn in range(rounds):
            for name in list(decoders)[:: 1 if turn % 2 else -1]:
                samples[name].append(decoders[name].steps())
    finally:
        for decoder in decoders.values():
            decoder.close()
    medians = {name: [statistics.median(each) for each in rounds] for name, rounds in samples.items()}
    ratios = [other / ours for other, ours in zip(medians["other"], medians["this"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    tokens = [decoder.tokens for decoder in decoders.values()]
    return work | {
        "median_seconds": {name: statistics.median(each) for name, each in medians.items()},
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "same_tokens": tokens[0] == tokens[1],
        "samples_seconds": samples,
    }


def revision(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = experiment_parser("checkouts", __doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "llama-3.2-1b-random"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 16], help="of weights, and of keys and values")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    checkouts = {"other": arguments.other.resolve(), "this": HERE}
    cells = []
    print(f"{'model':<22}{'bits':>5}{'context':>9}{'other':>11}{'this':>11}{'ratio':>8}")
    for model in arguments.models:
        for bits in arguments.bits:
            for context in arguments.contexts:
                work = {"model": model, "context": context, "weight_bits": bits, "kv_bits": bits}
                cell = measure(checkouts, work | {"threads": get_num_threads()}, arguments.rounds)
                cells.append(cell)
                times = "".join(f"{1e3 * seconds:>8.2f} ms" for seconds in cell["median_seconds"].values())
                different = "" if cell["same_tokens"] else "  other tokens"
                print(f"{model:<22}{bits:>5}{context:>9,}{times}{cell['ratio']:>7.2f}x{different}", flush=True)
    record = {"other_revision": revision(checkouts["other"]), "steps": STEPS, "cells": cells}
    print(f"record: {records.save('checkouts', record, arguments.out)}")
    print(json.dumps({f"{c['model']}, {c['kv_bits']} bits, {c['context']}": round(c["ratio"], 3) for c in cells}))


if __name__ == "__main__":
    main()
