"""
Every cache at every context length, on the machine at hand.

Each cell (model, cache, decode device, context, new tokens, repeat) is measured in a process of its own: time to the
first token, the time of every token after it, peaks of device and host memory, bytes of keys and values, bytes moved.
Memory that does not suffice is a result. What was measured before is not measured again, so a sweep that was stopped
goes on where it was. `python -m experiments.report` draws the figures.

With Slurm an array of jobs measures a share each, and one that is ended early may be started again:

    sbatch --array=1-8 --wrap 'python -m experiments.context_sweep --shard $SLURM_ARRAY_TASK_ID/8'
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from experiments.common import records
from experiments.common.options import byte_size, plain_parser
from experiments.sweep import store
from experiments.sweep.caches import CACHES, DECODE_DEVICES
from experiments.sweep.store import Cell
from hf_hybrid_cache.models import ModelLoadError, load_config

SMOKE = {"model": "smollm2-135m", "contexts": [320], "new_tokens": [4]}
_KERNEL_COUNTERS = Path("/proc/vmstat")
_SHOWN_LINES = 3


def share(text: str) -> tuple[int, int]:
    """Parse a share such as `2/4`, the second of four."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2/4: the second of four")
    return int(number), int(of)


def arguments() -> argparse.Namespace:
    parser = plain_parser("context_sweep/MACHINE", __doc__)
    parser.add_argument(
        "--model", default="llama-3.2-1b-random", help="any name of hf_hybrid_cache.models.load (default: %(default)s)"
    )
    parser.add_argument("--caches", choices=CACHES, nargs="+", default=list(CACHES), help="(default: all)")
    parser.add_argument("--decode-devices", choices=DECODE_DEVICES, nargs="+", default=list(DECODE_DEVICES))
    contexts = [2**power for power in range(10, 18)]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, help="tokens, the new ones included")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--real-tokens",
        type=int,
        default=2**17 if torch.cuda.is_available() else 2**12,
        help="longest context whose prompt is read; longer ones are random keys and values (default: %(default)s)",
    )
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--gpu-memory", type=byte_size, help="act as a card with less, such as 24GiB")
    parser.add_argument("--force", action="store_true", help="measure again what has a record")
    parser.add_argument("--smoke", action="store_true", help="a small model and short contexts, in a minute")
    parser.add_argument("--shard", type=share, default=(1, 1), help="measure only a share of the cells, such as 2/4")
    given = parser.parse_args()
    if given.smoke:
        parser.set_defaults(**SMOKE)
        given = parser.parse_args()
    if given.gpu_memory is not None and not torch.cuda.is_available():
        parser.error("--gpu-memory needs a GPU, and no CUDA device is available.")
    try:
        load_config(given.model)
    except ModelLoadError as error:
        parser.error(str(error))
    for context, new_tokens in itertools.product(given.contexts, given.new_tokens):
        if not 2 <= new_tokens < context:
            parser.error(f"{new_tokens:,} new tokens in a context of {context:,}: at least 2, and room for a prompt.")
    return given


def cells(options: argparse.Namespace) -> Iterable[Cell]:
    """Yield the cells to measure here, contexts ascending, all caches of one context next to each other."""
    orders = itertools.product(range(options.repeats), sorted(options.contexts), options.new_tokens, options.caches)
    for repeat, context, new_tokens, name in orders:
        prefill = "real" if context <= options.real_tokens else "synthetic"
        for device in CACHES[name].decode_devices() if CACHES[name].is_installed else ():
            if device in options.decode_devices:
                yield Cell(options.model, name, device, context, new_tokens, prefill, repeat)


def is_settled(record: dict[str, Any] | None, time_limit: float) -> bool:
    """Whether the record stays: a failure is measured again, and a timeout if the limit is higher now."""
    if record is None or record["result"]["status"] == "failed":
        return False
    return record["result"]["status"] != "time limit" or record["limit_seconds"] >= time_limit


def sweep(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, int]:
    """Measure what has no record yet; how many of the cells asked for have ended in which way."""
    stored = store.read(folder)
    for path, reason in stored.damaged.items():
        console.print(f"damaged, not used: {path.name}: {reason}", markup=False)
    for name in options.caches:
        if not CACHES[name].is_installed:
            console.print(f"{name} is left out: {CACHES[name].package} is not installed.", markup=False)
    number, of = options.shard
    wanted = list(cells(options))[number - 1 :: of]
    known = {} if options.force else stored.records
    todo = [cell for cell in wanted if not is_settled(known.get(cell), options.time_limit)]
    console.print(f"{len(wanted)} cells, {len(wanted) - len(todo)} measured before; records in {folder}")
    found = {cell: stored.records[cell] for cell in wanted if cell not in todo}
    for record in found.values():
        console.print(line_of(record), markup=False, highlight=False, style="dim")
    for cell in track(todo, "cells", console=console, disable=not console.is_terminal):
        found[cell] = store.checked(store.write(folder, measured_apart(cell, options.time_limit, options.gpu_memory)))
        console.print(line_of(found[cell]), markup=False, highlight=False)
    return Counter(record["result"]["status"] for record in found.values())


def line_of(record: dict[str, Any]) -> str:
    """Return what is printed of a record; the rest is in the summary."""
    name, result = Cell.from_record(record).name, record["result"]
    if result["status"] != "measured":
        return f"{name}: {result['status']}: {result['message']}"
    tokens, mebibytes = result["tokens_per_second"], result["kv_bytes"] / 2**20
    return f"{name}: {tokens:.2f} tokens/s, {mebibytes:,.1f} MiB of keys and values"


def measured_apart(cell: Cell, limit_seconds: float, gpu_bytes: int | None = None) -> dict[str, Any]:
    """
    The record of a cell, measured in a new process.

    A process that is killed for want of memory, takes longer than `limit_seconds` or fails has a record too, with that
    as its status. On Ctrl-C the process ends before this does.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "experiments.sweep.measure", json.dumps(asdict(cell)), str(out)]
        failure = run_limited([*command, *([] if gpu_bytes is None else [str(gpu_bytes)])], limit_seconds)
        if failure is None:
            found = json.loads(out.read_text())
        else:
            found = {"result": failure, "environment": records.environment()}
    return {"cell": asdict(cell), "limit_seconds": limit_seconds, **found}


def run_limited(command: list[str], limit_seconds: float) -> dict[str, Any] | None:
    """Run a program in the root of the repository; None if it succeeds, otherwise a result that says how it ended."""
    killed_before = _kills_for_memory()
    with subprocess.Popen(
        command, cwd=records.RESULTS.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return {"status": "time limit", "message": f"not done in {limit_seconds:,.0f} s"}
        finally:
            process.kill()
    if process.returncode == 0:
        return None
    if process.returncode == -signal.SIGKILL and _kills_for_memory() > killed_before:
        return {"status": "out of memory", "message": "killed by the kernel"}
    lines = [line for line in errors.splitlines() if line.strip()]
    return {"status": "failed", "message": "\n".join(lines[-_SHOWN_LINES:]) or f"exit status {process.returncode}"}


def _kills_for_memory() -> int:
    """Return the number of processes that the kernel has killed for lack of memory; 0 where it does not tell."""
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def main() -> None:
    options = arguments()
    folder = options.out or store.FOLDER / records.machine_name()
    console = Console(highlight=False, soft_wrap=True)
    try:
        print(json.dumps(sweep(options, folder, console)))
    except KeyboardInterrupt:
        console.print(f"stopped; {len(store.read(folder).records)} records are kept, the same command goes on.")
        sys.exit(130)
    finally:
        store.write_summary(folder)


if __name__ == "__main__":
    main()
