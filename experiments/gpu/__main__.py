"""
Run all measurements of a machine with a GPU in so many minutes: `python -m experiments.gpu`.

Decode steps at three contexts come first, then the tests that need a GPU. Every step is a process of its own that
writes its record as it goes. When time is up the step that runs is interrupted, and what is left is said; the same
command goes on there. It needs torch, transformers, Triton, Numba and psutil, and pytest with hypothesis for the tests.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from experiments.common import records
from experiments.common.options import plain_parser
from experiments.gpu.page import found_in, tables
from experiments.gpu.suites import add_other_transformers

_REHEARSAL = records.RESULTS.parent / "build" / "gpu-rehearsal"
_LEAST_SECONDS = 20  # in less than that nothing is measured
_SECONDS_TO_STOP = 15
# So that a step that hangs leaves time to the others.
_LIMIT_SECONDS = 240
DONE, FAILED, STOPPED, NOT_BEGUN = "done", "failed", "stopped", "not begun"


def all_steps(root: Path, options: Sequence[str], is_rehearsal: bool, others: Sequence[Path]) -> dict[str, list[str]]:
    """
    Return the arguments of Python for each step, the most valuable first.

    Args:
        root: folder of all results.
        options: of every step.
        is_rehearsal: with small sizes.
        others: folders with other versions of transformers, for the tests.
    """
    contexts = (300, 600) if is_rehearsal else (131_072, 32_768, 65_536)
    steps = {f"decode-{context}": ["decode", "--context", str(context)] for context in contexts}
    steps["suites"] = ["suites", *(["--other-transformers", *map(str, others)] if others else [])]
    return {
        name: ["-m", f"experiments.gpu.{module}", *given, *options, "--out", str(root / "gpu" / name)]
        for name, (module, *given) in steps.items()
    }


def run_all(steps: Mapping[str, Sequence[str]], minutes: float) -> dict[str, str]:
    """Run the steps in their order until the time is up; how each ended, by name."""
    deadline = time.monotonic() + 60 * minutes
    ended = dict.fromkeys(steps, NOT_BEGUN)
    for name, arguments in steps.items():
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            break
        print(f"== {name}, with {left / 60:.1f} minutes left", flush=True)
        start = time.monotonic()
        ended[name] = run_step(arguments, min(left, _LIMIT_SECONDS))
        print(f"== {name}: {ended[name]} after {time.monotonic() - start:.0f} s", flush=True)
    return ended


def run_step(arguments: Sequence[str], seconds: float) -> str:
    """Run one step; at its limit interrupt all processes that it started, and kill them if they go on."""
    with subprocess.Popen([sys.executable, *arguments], cwd=records.RESULTS.parent, start_new_session=True) as process:
        try:
            return DONE if process.wait(seconds) == 0 else FAILED
        except subprocess.TimeoutExpired:
            return STOPPED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_STOP)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends processes that it has left running


def main() -> None:
    parser = plain_parser("gpu", __doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="in all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--force", action="store_true", help="measure again what is done")
    parser.add_argument("--rehearse", action="store_true", help="small, and on the CPU where there is no GPU")
    add_other_transformers(parser)
    given = parser.parse_args()
    root = (given.out or (_REHEARSAL if given.rehearse else records.RESULTS)).absolute()
    options = [*(["--rehearse"] if given.rehearse else []), *(["--force"] if given.force else [])]
    steps = all_steps(root, options, given.rehearse, given.other_transformers)
    if unknown := set(given.only or ()).difference(steps):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}.")
    steps = {name: step for name, step in steps.items() if name in (given.only or steps)}
    if not (given.rehearse or torch.cuda.is_available()):
        parser.error("no CUDA device is available: pass --rehearse to try it out on the CPU.")
    # SIGTERM acts as Ctrl-C, so that the running step is ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ended = run_all(steps, given.minutes)
    except KeyboardInterrupt:
        print("stopped; the same command goes on.")
        sys.exit(130)
    print(f"\nrecords: {root / 'gpu'}\n")
    print(tables(found_in(root / "gpu", records.machine_name())))
    if left := [name for name, how in ended.items() if how != DONE]:
        print(f"Left: {', '.join(left)}. The same command goes on.")
    print(json.dumps(ended))
    if FAILED in ended.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
