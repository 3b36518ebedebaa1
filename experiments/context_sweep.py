"""
Every cache at every context length, on the machine at hand.

Each cell (model, cache, decode device, context, new tokens, repeat) is measured in a process of its own: time to the
first token, the time of every token after it, peaks of device and host memory, bytes of keys and values, bytes moved.
Memory that does not suffice is a result. What was measured before is not measured again, so a sweep that was stopped
goes on where it was. `python -m experiments.report` draws the figures.
"""

import argparse
import itertools
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

import torch

from experiments.common import records
from experiments.common.options import byte_size
from experiments.sweep import store
from experiments.sweep.caches import CACHES, DECODE_DEVICES
from experiments.sweep.jobs import EXECUTORS, JobFailedError, JobsError, job_parameters, run_jobs
from experiments.sweep.prefill_time import ProbeError
from experiments.sweep.running import cells, measured
from experiments.sweep.shares import Share, shares

MODEL = "llama-3.2-1b-random"
CONTEXTS = [2**power for power in range(10, 18)]
NEW_TOKENS = [100, 500]
SMOKE = {"model": "smollm2-135m", "contexts": [320], "new_tokens": [4]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="any name of hf_hybrid_cache.models.load (default: %(default)s)")
    parser.add_argument("--caches", choices=CACHES, nargs="+", default=list(CACHES), help="(default: all)")
    parser.add_argument("--decode-devices", choices=DECODE_DEVICES, nargs="+", default=list(DECODE_DEVICES))
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens, the new ones included")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=NEW_TOKENS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--prefill",
        choices=["auto", "real", "synthetic"],
        default="auto",
        help="auto: real where it is estimated to take less than --prefill-limit",
    )
    parser.add_argument("--prefill-limit", type=float, default=30.0, help="seconds (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--gpu-memory", type=byte_size, help="act as a card with less, such as 24GiB")
    parser.add_argument("--force", action="store_true", help="measure again what has a record")
    parser.add_argument("--smoke", action="store_true", help="a small model and short contexts, in a minute")
    parser.add_argument("--out", type=Path, help="folder of the records (default: results/context_sweep/MACHINE)")
    parser.add_argument("--shard", type=Share.parse, help="measure only a share of the cells, such as 2/4")
    parser.add_argument("--executor", choices=EXECUTORS, help="run cells as jobs: on this machine, or of Slurm")
    parser.add_argument("--jobs", type=int, help="with --executor: how many run at once (default: 1)")
    parser.add_argument(
        "--job-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --executor: of submitit's, such as timeout_min=60 or slurm_partition=gpu; may be repeated",
    )
    given = parser.parse_args()
    if given.smoke:
        parser.set_defaults(**SMOKE)
        given = parser.parse_args()
    if given.gpu_memory is not None and not torch.cuda.is_available():
        parser.error("--gpu-memory needs a GPU, and no CUDA device is available.")
    if given.executor is None and (given.jobs is not None or given.job_option):
        parser.error("--jobs and --job-option are for --executor.")
    if given.executor is not None and given.shard is not None:
        parser.error("--executor shares the cells out itself: drop --shard.")
    if given.jobs is not None and given.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {given.jobs}.")
    for context, new_tokens in itertools.product(given.contexts, given.new_tokens):
        if not 2 <= new_tokens < context:
            parser.error(f"{new_tokens:,} new tokens in a context of {context:,}: at least 2, and room for a prompt.")
    return given


def measured_in_jobs(options: argparse.Namespace) -> dict[str, int]:
    """
    Measure each cell in a job of its own, on this machine or on a cluster; records are in the folders of the jobs.

    Raises:
        JobsError: jobs cannot be started, or some of them ended without having measured their cells.
    """
    if options.out is not None:
        options.out = options.out.absolute()
    folder = (options.out or store.FOLDER / records.machine_name()) / "jobs"
    at_once, parameters = options.jobs or 1, job_parameters(options.job_option)
    # Without an estimate, which the machines make where they measure.
    count = len(list(cells(options, None)))
    print(f"{count} jobs, {at_once} at once; what they print is in {folder}", flush=True)
    jobs = run_jobs(shares(options, count), options.executor, folder, at_once, parameters)
    statuses: Counter[str] = Counter()
    failures = []
    for ended, outcome in enumerate(jobs, 1):
        if isinstance(outcome, JobFailedError):
            failures.append(outcome)
        else:
            statuses.update(outcome)
        print(f"{ended} of {count}", flush=True)
    if failures:
        raise JobsError(f"{len(failures)} of {count} jobs failed, the last with: {failures[-1]}")
    return statuses


def main() -> None:
    options = arguments()
    try:
        statuses = measured(options) if options.executor is None else measured_in_jobs(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ProbeError, JobsError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
