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
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.harness import Cell, publish, summed_up
from experiments.common.options import plain_parser
from experiments.common.timing import samples_in_turns
from experiments.common.told_process import HERE, ToldProcess
from hf_hybrid_cache import get_num_threads

PROGRAM = Path(__file__).with_name("stepping_process.py")
STEPS = 5


def measure(checkouts: dict[str, Path], work: dict[str, Any], rounds: int) -> Cell:
    """A cell: medians of each, raw samples, and the median and quartiles of the ratios of all rounds."""
    tokens: dict[str, list[int]] = {}
    with ExitStack() as stack:

        def started(path: Path) -> ToldProcess:
            command = [sys.executable, str(PROGRAM), json.dumps(work)]
            return stack.enter_context(closing(ToldProcess(command, path, {**os.environ, "PYTHONPATH": str(path)})))

        processes = {name: started(path) for name, path in checkouts.items()}

        def step(name: str) -> float:
            seconds, tokens[name] = processes[name].ask(STEPS)
            return statistics.median(seconds[1:])

        samples = samples_in_turns({name: partial(step, name) for name in processes}, rounds, lambda name: None)
    ratios = [other / ours for other, ours in zip(samples["other"], samples["this"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    same_tokens = tokens["other"] == tokens["this"]
    return {**work, "ratio": middle, "ratio_quartiles": [low, high], "same_tokens": same_tokens, **summed_up(samples)}


def revision(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = plain_parser("checkouts", __doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "llama-3.2-1b-random"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 16], help="of weights, and of keys and values")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    checkouts = {"other": arguments.other.resolve(), "this": HERE}

    def cells() -> Iterator[tuple[str, Cell]]:
        for model in arguments.models:
            for bits in arguments.bits:
                for context in arguments.contexts:
                    work = {"model": model, "context": context, "weight_bits": bits, "kv_bits": bits}
                    cell = measure(checkouts, work | {"threads": get_num_threads()}, arguments.rounds)
                    yield f"{model}, {bits} bits, {context}", cell

    publish("checkouts", cells(), arguments.out, other_revision=revision(checkouts["other"]), steps=STEPS)


if __name__ == "__main__":
    main()
