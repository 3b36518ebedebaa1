"""Writes the figures of the context sweep and its page, from records only."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.common import pictures
from experiments.common.records import RESULTS
from experiments.sweep import figures, store
from experiments.sweep.page import page
from experiments.sweep.points import points

PAGE = "README.md"
MachineRecords = list[dict[str, Any]]


def all_records() -> dict[str, MachineRecords]:
    """Return all whole records, by machine."""
    folders = sorted(path for path in store.FOLDER.glob("*") if path.is_dir())
    return {folder.name: list(store.read(folder).records.values()) for folder in folders}


def figures_of(found: MachineRecords) -> dict[str, Callable[[], Figure]]:
    """Return the function that draws each figure, by file name, as far as there are records for it."""
    curves = points(found)
    environment = found[-1]["environment"]
    models = ", ".join(sorted({record["cell"]["model"] for record in found}))
    title = f"{models}, {environment['cpu']}, {environment['cores']} cores"
    limit = environment.get("gpu_memory_limit_bytes") or environment["memory_bytes"]
    drawn: dict[str, Callable[[], Figure]] = {
        "throughput": partial(figures.throughput, curves, title),
        "latency": partial(figures.latency, curves, title),
        "memory": partial(figures.memory, curves, limit, f"{limit / 2**30:.0f} GiB", title),
        "host_memory_per_speed": partial(figures.memory_per_speed, curves, "host", title),
    }
    if any(point.ttft_seconds is not None for found_points in curves.values() for point in found_points):
        drawn["first_token"] = partial(figures.first_token, curves, title)
    if figures.has_gpu(curves):
        drawn["device_memory_per_speed"] = partial(figures.memory_per_speed, curves, "device", title)
        drawn["speed_ratio"] = partial(figures.speed_ratio, curves, title)
    return drawn


def page_of(machines: Mapping[str, MachineRecords]) -> str:
    """The page, with the figures as they lie beside the records."""
    folder = store.FOLDER.relative_to(RESULTS)
    shown = {
        machine: [folder / machine / f"{name}.png" for name in figures_of(found)]
        for machine, found in machines.items()
        if found
    }
    return page(machines, shown)


def draw_all() -> Iterator[Path]:
    """Draw and write everything; the paths of the figures and of the page."""
    machines = all_records()
    for machine, found in machines.items():
        for name, draw in figures_of(found).items() if found else ():
            path = store.FOLDER / machine / name
            pictures.write(draw(), path)
            yield path.with_suffix(".svg")
    path = RESULTS / PAGE
    path.write_text(page_of(machines))
    yield path
