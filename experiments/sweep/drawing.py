"""The figures of the context sweep, from records only."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.common import pictures
from experiments.sweep import store
from experiments.sweep.caches import CPU, CPU_ATTENTION, GPU
from experiments.sweep.points import Curve, Point, points, read_rate

Curves = Mapping[Curve, list[Point]]
MachineRecords = list[dict[str, Any]]

# Label, colour of Okabe and Ito's palette, and marker; caches that share a colour differ in their markers.
STYLES: dict[str, tuple[str, str, str]] = {
    "stock": ("transformers DynamicCache", "#D55E00", "s"),
    "stock-offloaded": ("transformers, offloaded", "#D55E00", "v"),
    "quanto-4": ("transformers QuantizedCache, quanto 4 bits", "#E69F00", "D"),
    "dynamic": ("DynamicHybridCache", "#0072B2", "o"),
    "offloaded": ("OffloadedHybridCache", "#56B4E9", "^"),
    "quantized-8": ("QuantizedHybridCache, 8 bits", "#009E73", "o"),
    "quantized-4": ("QuantizedHybridCache, 4 bits", "#CC79A7", "P"),
    "quantized-2": ("QuantizedHybridCache, 2 bits", "#000000", "X"),
    "quantized-4-offloaded": ("the same, 4 bits, offloaded", "#CC79A7", "v"),
    "dynamic-weights-8": ("DynamicHybridCache, weights in 8 bits", "#0072B2", "<"),
    "dynamic-weights-4": ("DynamicHybridCache, weights in 4 bits", "#0072B2", ">"),
    "quantized-4-weights-4": ("QuantizedHybridCache and weights, 4 bits", "#CC79A7", ">"),
}
DEVICES = {GPU: "on the GPU", CPU_ATTENTION: "attention on the CPU", CPU: "decode on the CPU"}
_LINES = {GPU: "-", CPU_ATTENTION: "--", CPU: ":"}
_ROOF_COLOUR = "#666666"


def all_records() -> dict[str, MachineRecords]:
    """Return all whole records, by machine."""
    folders = sorted(path for path in store.FOLDER.glob("*") if path.is_dir())
    return {folder.name: list(store.read(folder).records.values()) for folder in folders}


def label(curve: Curve) -> str:
    name, device = curve
    return f"{STYLES[name][0]}, {DEVICES[device]}"


def figures_of(found: MachineRecords) -> dict[str, Callable[[], Figure]]:
    """Return the function that draws each figure, by file name, as far as there are records for it."""
    curves = points(found)
    environment = found[-1]["environment"]
    models = ", ".join(sorted({record["cell"]["model"] for record in found}))
    title = f"{models}, {environment['cpu']}, {environment['cores']} cores"
    limit = environment.get("gpu_memory_limit_bytes") or environment["memory_bytes"]
    draw = partial(_draw, curves, title)
    drawn: dict[str, Callable[[], Figure]] = {
        "throughput": partial(draw, "tokens a second", lambda point: point.tokens_per_second, has_roofs=True),
        "latency": partial(draw, "milliseconds a token, 99th percentile", lambda point: point.latency(99) * 1e3),
        "memory": partial(draw, "MiB of keys and values", lambda point: point.kv_bytes / 2**20, limit=limit / 2**20),
    }
    real = {curve: [point for point in each if point.ttft_seconds is not None] for curve, each in curves.items()}
    if any(real.values()):
        drawn["first_token"] = partial(
            _draw, real, title, "seconds to the first token", lambda point: point.ttft_seconds
        )
    return drawn


def draw_all() -> Iterator[Path]:
    """Draw all figures beside the records; the paths of what was written."""
    for machine, found in all_records().items():
        for name, draw in figures_of(found).items() if found else ():
            path = store.FOLDER / machine / name
            pictures.write(draw(), path)
            yield path.with_suffix(".svg")


def _draw(
    curves: Curves,
    title: str,
    y_label: str,
    value: Callable[[Point], Any],
    has_roofs: bool = False,
    limit: float | None = None,
) -> Figure:
    """Draw a value by context, with the speed of reading everything once, or a limit."""
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    several = len({device for _, device in curves}) > 1
    for (name, device), found in sorted(curves.items(), key=lambda item: list(STYLES).index(item[0][0])):
        text, colour, marker = STYLES[name]
        axes.plot(
            [point.context_tokens for point in found],
            [value(point) for point in found],
            _LINES[device] if several else "-",
            label=label((name, device)) if several else text,
            color=colour,
            marker=marker,
            markersize=5,
        )
    for name, line, kind in (("stock", "--", "bfloat16"), ("quantized-4", "-.", "4-bit")) if has_roofs else ():
        if roof := curves.get((name, CPU)):
            speeds = [point.roof(read_rate(curves)) for point in roof]
            text = f"roof: reading weights and {kind} KV once"
            axes.plot([point.context_tokens for point in roof], speeds, line, color=_ROOF_COLOUR, label=text)
    if limit is not None:
        axes.axhline(limit, color=_ROOF_COLOUR, linestyle="--", label=f"{limit / 2**10:.0f} GiB")
    return _finished(figure, curves, y_label, title)


def _finished(figure: Figure, curves: Curves, y_label: str, title: str) -> Figure:
    axes = figure.axes[0]
    pictures.style(axes, "context, tokens", y_label)
    axes.set_xticks(sorted({point.context_tokens for found in curves.values() for point in found}))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
