"""
Run all measurements of a machine with a GPU in so many minutes: `python -m experiments.gpu`.

Every step is a process of its own, whose record is written as soon as it ends. When time is up the step that runs is
stopped; the same command goes on where it was. It needs torch, transformers, Triton, Numba and psutil, and leaves out
what needs a package that is not there.
"""

import argparse
import json
import signal
import sys
import textwrap
from pathlib import Path

from experiments.common import records
from experiments.gpu.answers import answers, table
from experiments.gpu.found import found_in
from experiments.gpu.machine import has_gpu
from experiments.gpu.running import Ended, Journal, run_all
from experiments.gpu.steps import FOLDER, all_steps
from experiments.gpu.suites import add_other_transformers

_REHEARSAL = records.RESULTS.parent / "build" / "gpu-rehearsal"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu",
        description=textwrap.dedent(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="in all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone; --list names them")
    parser.add_argument("--force", action="store_true", help="measure again what is done")
    parser.add_argument("--list", action="store_true", help="name the steps, and do nothing")
    parser.add_argument(
        "--rehearse", action="store_true", help="all of it with small sizes, on the CPU where there is no GPU"
    )
    parser.add_argument("--out", type=Path, help="folder of all results (default: results; of a rehearsal, in build)")
    add_other_transformers(parser)
    given = parser.parse_args()
    given.out = (given.out or (_REHEARSAL if given.rehearse else records.RESULTS)).absolute()
    given.steps = all_steps(given.out, given.rehearse, given.other_transformers)
    known = [step.name for step in given.steps]
    if unknown := set(given.only or ()).difference(known):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    if given.only:
        given.steps = [step for step in given.steps if step.name in given.only]
    if not (given.list or given.rehearse or has_gpu()):
        parser.error("no CUDA device is available: pass --rehearse to try it out on the CPU.")
    return given


def main() -> None:
    given = arguments()
    if given.list:
        print("\n".join(step.name for step in given.steps))
        return
    # SIGTERM acts as Ctrl-C, so that the running step is ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ended = run_all(given.steps, Journal(given.out / FOLDER), given.minutes, given.force)
    except KeyboardInterrupt:
        print("stopped; the same command goes on.")
        sys.exit(130)
    print(f"\nrecords: {given.out / FOLDER}\n")
    print(table(answers(found_in(given.out / FOLDER, records.machine_name()))))
    if set(ended.values()) != {Ended.DONE}:
        print("There is more to measure: the same command goes on.")
    print(json.dumps(ended))
    if Ended.FAILED in ended.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
