"""Measures the cells that were asked for, on this machine: what has a record is not measured again."""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.common import records
from experiments.sweep import store
from experiments.sweep.caches import CACHES
from experiments.sweep.cell import Cell
from experiments.sweep.prefill_time import PrefillTime, probed
from experiments.sweep.process import measured_apart
from experiments.sweep.table import HEADINGS, row

# A context of this many tokens is expected to take twice as long as a very short one.
_LONG_CONTEXT = 16_384


def measured(options: argparse.Namespace) -> dict[str, int]:
    """Measure the cells, or a share of them, on this machine; how many ended in which way."""
    folder = options.out or store.FOLDER / records.machine_name()
    console = Console(highlight=False, soft_wrap=True)
    try:
        found = sweep(options, folder, console)
    except KeyboardInterrupt:
        console.print(f"stopped; {len(store.read(folder).records)} records are kept, the same command goes on.")
        raise
    finally:
        store.write_summary(folder)
    return Counter(record["result"]["status"] for record in found.values())


def cells(options: argparse.Namespace, prefill_time: PrefillTime | None) -> Iterable[Cell]:
    """Yield the cells to measure here, contexts ascending, all caches of one context next to each other."""
    orders = itertools.product(range(options.repeats), sorted(options.contexts), options.new_tokens, options.caches)
    for repeat, context, new_tokens, name in orders:
        if not CACHES[name].is_installed:
            continue
        for device in CACHES[name].decode_devices():
            if device not in options.decode_devices:
                continue
            prefill = options.prefill
            if prefill_time is not None:
                takes_long = prefill_time.seconds(context - new_tokens) > options.prefill_limit
                prefill = "synthetic" if takes_long else "real"
            yield Cell(options.model, name, device, context, new_tokens, prefill, repeat)


def is_settled(record: dict[str, Any] | None, time_limit: float) -> bool:
    """Whether the record stays: a failure is measured again, and a timeout if the limit is higher now."""
    if record is None or record["result"]["status"] == "failed":
        return False
    return record["result"]["status"] != "time limit" or record["limit_seconds"] >= time_limit


def sweep(options: argparse.Namespace, folder: Path, console: Console) -> dict[Cell, dict[str, Any]]:
    """Measure what has no record yet; all records that the cells asked for have now."""
    stored = store.read(folder)
    for path, reason in stored.damaged.items():
        console.print(f"damaged, not used: {path.name}: {reason}", markup=False)
    for name in options.caches:
        if not CACHES[name].is_installed:
            console.print(f"{name} is left out: {CACHES[name].package} is not installed.", markup=False)
    prefill_time = (
        probed(options.model, folder, options.force, options.time_limit) if options.prefill == "auto" else None
    )
    wanted = list(cells(options, prefill_time))
    if options.shard is not None:
        wanted = options.shard.take(wanted)
    known = {} if options.force else stored.records
    todo = [cell for cell in wanted if not is_settled(known.get(cell), options.time_limit)]
    console.print(f"{len(wanted)} cells, {len(wanted) - len(todo)} measured before; records in {folder}")
    console.print(HEADINGS, markup=False, highlight=False)
    found = {cell: stored.records[cell] for cell in wanted if cell not in todo}
    for record in found.values():
        console.print(row(record), markup=False, highlight=False, style="dim")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(weight(cell) for cell in todo))
        for cell in todo:
            progress.update(bar, description=f"{cell.cache}, {cell.context_tokens:,}")
            record = measured_apart(cell, options.time_limit, options.gpu_memory)
            path = store.write(folder, record)
            found[cell] = store.checked(path)
            console.print(row(record), markup=False, highlight=False)
            progress.advance(bar, weight(cell))
    return found


def weight(cell: Cell) -> int:
    """Return the weight of a cell in the progress of all."""
    return 100 + 100 * cell.context_tokens // _LONG_CONTEXT
