"""
A measurement: variants take turns, each cell is printed as it comes, and all become a record with its environment.

A program is its variants and its arguments:

    def cells() -> Iterator[tuple[str, Cell]]:
        for tokens in arguments.tokens:
            variants = {"stock": stock_step(tokens), "ours": our_step(tokens)}
            cell = cold_turns(variants, arguments.rounds, reader)
            yield f"{tokens} tokens", {"tokens": tokens, "ratio": over(cell, "ours"), **cell}

    publish("decode_speed", cells(), arguments.out)
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.common.bandwidth import MemoryReader, read_bandwidth
from experiments.common.timing import in_turns, medians

Cell = dict[str, Any]
Actions = Mapping[str, Callable[[], object]]


def summed_up(samples: Mapping[str, list[float]]) -> Cell:
    """The part of a cell that every measurement has: medians and raw samples."""
    return {"median_seconds": medians(samples), "samples_seconds": dict(samples)}


def turns(variants: Actions, rounds: int, before: Callable[[str], object] = lambda name: None) -> Cell:
    """Time variants in turns; `before` is called with the name before each, untimed."""
    return summed_up(in_turns(variants, rounds, before))


def cold_turns(variants: Actions, rounds: int, reader: MemoryReader, warm_up: Actions | None = None) -> Cell:
    """
    Time variants in turns, with cold data and warm code, as the layers of a model find them.

    Args:
        variants: what to time, by name.
        rounds: samples of each.
        reader: empties the processor's caches before each sample.
        warm_up: runs after that, by the same names; by default the variants themselves.
    """

    def make_data_cold_and_code_warm(name: str) -> None:
        reader.read()
        (warm_up or variants)[name]()

    return turns(variants, rounds, make_data_cold_and_code_warm)


def apart(measure: Callable[..., Cell], *arguments: object) -> Cell:
    """Measure in a new process, because what one has left in the allocator changes memory and speed."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def over(cell: Cell, name: str) -> dict[str, float]:
    """Return the time of each other variant over that of one."""
    seconds = cell["median_seconds"]
    return {other: value / seconds[name] for other, value in seconds.items() if other != name}


def publish(
    experiment: str,
    cells: Iterable[tuple[str, Cell]],
    folder: Path | None = None,
    answer: Callable[[Cell], Any] = lambda cell: cell["ratio"],
    **record: Any,
) -> list[Cell]:
    """
    Print cells as they are measured, and then their record's path and a line of JSON that answers for each.

    Args:
        experiment: name in the record, and its folder in `results`.
        cells: each with what it is called.
        folder: another one for the record.
        answer: the figures of a cell that count; the line of JSON has them by the cells' names.
        record: what it contains besides cells and environment.
    """
    found = []
    answers = {}
    for name, cell in cells:
        print(table(name, cell), flush=True)
        found.append(cell)
        answers[name] = rounded(answer(cell))
    finish(experiment, {**record, "cells": found}, answers, folder)
    return found


def publish_all(
    experiment: str,
    arguments: argparse.Namespace,
    measure: Callable[..., Cell],
    varied: Iterable[Iterable[Any]],
    answer: Callable[[Cell], Any],
    **record: Any,
) -> None:
    """
    Measure each combination of what is varied, and publish its cell.

    Args:
        experiment: see `publish`.
        arguments: of the program: `rounds`, `out` and `buffer_mib`.
        measure: takes a combination, the rounds, and what empties the processor's caches.
        varied: the values of each argument.
        answer: see `publish`.
        **record: see `publish`.
    """
    reader = MemoryReader(arguments.buffer_mib)
    read_bandwidth(reader)
    cells = ((", ".join(map(str, each)), measure(*each, arguments.rounds, reader)) for each in product(*varied))
    publish(experiment, cells, arguments.out, answer, **record)


def finish(experiment: str, record: dict[str, Any], answers: object, folder: Path | None = None) -> None:
    """Save a record, and print where it is, and the answers as the last line."""
    print(f"record: {records.save(experiment, record, folder)}")
    print(json.dumps(answers))


def table(name: str, cell: Cell) -> str:
    """Lines for a cell: its own figures, and a row for each variant with a column for all that is told of each."""
    columns = {
        key: value
        for key, value in cell.items()
        if isinstance(value, dict) and value and all(map(_is_figure, value.values()))
    }
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    width = 2 + max(map(len, (name, *rows)))
    own = {key: value for key, value in cell.items() if _is_figure(value) and value is not None}
    lines = [", ".join(f"{_words(key)} {_shown(key, value)}" for key, value in own.items())] if own else []
    widths = {key: max(16, 2 + len(_words(key))) for key in columns}
    lines.append(f"{name:<{width}}" + "".join(f"{_words(key):>{widths[key]}}" for key in columns))
    lines += [
        f"{row:<{width}}" + "".join(f"{_shown(key, column.get(row)):>{widths[key]}}" for key, column in columns.items())
        for row in rows
    ]
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Numbers with three decimals, also in dicts and lists."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float | str | None)


def _words(key: str) -> str:
    return key.removeprefix("median_").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if not isinstance(value, float | int) or isinstance(value, bool):
        return "" if value is None else str(value)
    if key.endswith("per_second"):
        return f"{value / 1e9:,.2f} G"
    if "seconds" in key:
        return f"{value * 1e3:,.3f} ms"
    if key.endswith("bytes") and "share" not in key:
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return f"{value:,}"
