"""
Write figures, tables and pages from committed records, never from new measurements: `python -m experiments.report`.

In `docs/results.md` a comment before a table says which record its rows come from, and how a row looks:

    <!-- rows kv_memory/MACHINE: | {format} | {bytes:GiB} | {share_of_bfloat16:.3f} | -->
    | format | bytes | of bfloat16 |
    |---|---|---|
    | int8 | 2.13 GiB | 0.532 |

The rows are the record's `cells`, or what a path after the record names: `cells.-1.caches` has a row for each cache,
with its name. Where a record lacks a figure the row has nothing, and a row without any figure is left out. Several
comments before a table give it their rows in turn.
"""

import json
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from experiments.common import pictures
from experiments.common.records import RESULTS
from experiments.gpu import page as gpu
from experiments.sweep import drawing
from experiments.sweep import page as sweep

PAGE = RESULTS.parent / "docs" / "results.md"
GPU_START, GPU_END = "<!-- measured on a GPU -->", "<!-- end -->"
# Okabe and Ito's palette, whose colours the colour-blind can tell apart.
STOCK_COLOUR, OUR_COLOUR, OTHER_COLOUR, CEILING_COLOUR = "#D55E00", "#0072B2", "#CC79A7", "#666666"
QUALITY, DECODE = "quality/perplexity", "decode_speed/llama-3.2-1b-random"
# Worse than this is no use, and would press everything else together.
_MOST_DIVERGENCE = 1.0
_ROWS = re.compile(r"<!-- rows (?P<record>\S+?)(?: (?P<path>\S+))?: (?P<row>.*) -->")
# Factor and unit of a figure with three digits.
_UNITS = {"s": (1.0, " s"), "ms": (1e3, " ms"), "MiB": (2.0**-20, " MiB"), "GiB": (2.0**-30, " GiB")}
Record = dict[str, Any]


def load_records(folder: str) -> dict[str, Record]:
    """Records in a folder of `results`, by machine."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))}


class Row(string.Formatter):
    """Fills a row in: figures with units, signs or digits, the median of several, and nothing for what is missing."""

    has_figure = False

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, IndexError, TypeError, AttributeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, list):
            value = median(value)
        self.has_figure |= not isinstance(value, str)
        if format_spec == "x":
            return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"
        if format_spec in _UNITS:
            factor, unit = _UNITS[format_spec]
            return f"{_three_digits(value * factor)}{unit}"
        return super().format_field(value, format_spec)


def filled(template: str, figures: Record) -> str:
    """Return a row with its figures; nothing if there is none."""
    row = Row()
    text = row.vformat(template, (), figures)
    return text if row.has_figure else ""


def _three_digits(value: float) -> str:
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def rows_of(record: Record, path: str) -> list[Record]:
    """Return a list that a path names, or of a mapping a row each, with all other figures of its name."""
    found: Any = record
    figures: Record = {}
    for part in path.split("."):
        if isinstance(found, dict):
            figures |= {key: each for key, each in found.items() if isinstance(each, dict)}
        found = found[int(part) if isinstance(found, list) else part]
    if isinstance(found, list):
        return found
    rows = [{"name": name, **{key: each.get(name) for key, each in figures.items()}} for name in found]
    return [row | value if isinstance(value, dict) else row for row, value in zip(rows, found.values(), strict=True)]


def with_tables(text: str, load: Callable[[str], Record]) -> str:
    """Return a page with the rows of its tables written anew."""
    written: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        written.append(line)
        rows: list[str] = []
        while match := _ROWS.fullmatch(line):
            found = rows_of(load(match["record"]), match["path"] or "cells")
            rows += filter(None, (filled(match["row"], each) for each in found))
            written.append(line := next(lines))
        if rows:
            written += [next(lines), *rows]
            written.append(next(line for line in lines if not line.startswith("|")))
    return "\n".join(written) + "\n"


def load(name: str) -> Record:
    """Load a record by its path in `results`, without the suffix."""
    record: Record = json.loads((RESULTS / f"{name}.json").read_text())
    if name.startswith(QUALITY):  # increases in shorter windows stand in the rows of the longest
        *shorter, longest = sorted(record["cells"], key=lambda cell: cell["window_tokens"])
        longest["shorter"] = {
            name: {cell["window_tokens"]: cell["caches"][name]["increase"] for cell in shorter}
            for name in longest["caches"]
        }
    return record


def pages() -> dict[Path, str]:
    """Return the text of each page that comes from records."""
    before, rest = PAGE.read_text().split(GPU_START)
    sections = "\n".join(gpu.section(machine, found) for machine, found in gpu.committed().items())
    text = f"{before}{GPU_START}\n{sections}{GPU_END}{rest.split(GPU_END, 1)[1]}"
    return {PAGE: with_tables(text, load), sweep.PAGE: sweep.page(drawing.all_records())}


def draw_speed(record: Record, axes: Axes, other: Record | None = None) -> None:
    """Medians of ours, in 4 bits too, and stock, with their ratio at each context, and the ceiling."""
    cells = record["cells"]
    curves = [("stock", "transformers DynamicCache", STOCK_COLOUR, "s", cells, 8)]
    curves += [("ours", "DynamicHybridCache", OUR_COLOUR, "o", cells, 0)]
    curves += [("ours", "QuantizedHybridCache(bits=4)", OTHER_COLOUR, "P", other["cells"], -16)] if other else []
    for key, label, colour, marker, found, offset in curves:
        places = [(cell["context_tokens"], cell["median_seconds"][key] * 1e3) for cell in found]
        axes.plot(*zip(*places, strict=True), marker=marker, color=colour, label=label)
        for cell, place in zip(found, places, strict=True) if offset else ():
            ratio = Row().format_field(cell["ratio"], "x")
            axes.annotate(ratio, place, (0, offset), textcoords="offset points", ha="center", color=colour)
    tokens, ceilings = zip(*((cell["context_tokens"], cell["ceiling_seconds"] * 1e3) for cell in cells), strict=True)
    axes.plot(tokens, ceilings, "--", color=CEILING_COLOUR, label="reading weights and KV once")
    axes.margins(y=0.12)
    pictures.style(axes, "context, tokens", "milliseconds a token, whole model")
    axes.set_title("Llama-3.2-1B shape, bfloat16, on the CPU", fontsize=11)
    axes.legend(frameon=False)


def draw_quality(record: Record, axes: Axes) -> None:
    """Divergence from full precision against stored bytes, in the largest window; nearer to the corner is better."""
    windows = [cell for cell in record["cells"] if cell["measure"] == "perplexity"]
    cell = max(windows, key=lambda cell: cell["window_tokens"])
    rows = {name: row for name, row in cell["caches"].items() if not name.endswith(("-rotated", "-plain"))}
    for name, row in rows.items():
        if 0 < row["kl_nats"] < _MOST_DIVERGENCE:
            ours = name.startswith("ours")
            place = (row["share_of_bfloat16"], row["kl_nats"])
            axes.plot(*place, marker="o" if ours else "s", color=OUR_COLOUR if ours else STOCK_COLOUR)
            axes.annotate(name, place, xytext=(6, 3), textcoords="offset points", fontsize=9)
    left_out = ", ".join(name for name, row in rows.items() if row["kl_nats"] >= _MOST_DIVERGENCE)
    axes.set_yscale("log")
    axes.margins(x=0.15, y=0.12)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("bytes held, of a bfloat16 cache" + (f" (beyond the scale: {left_out})" if left_out else ""))
    axes.set_ylabel("KL divergence from full precision, nats")
    axes.set_title(f"SmolLM2-135M, English text, {cell['stored_tokens']:,} tokens, decoded in steps", fontsize=11)
    axes.grid(alpha=0.3)


def drawings() -> Iterator[tuple[Path, Callable[[Axes], None]]]:
    """Yield the path of each figure that comes from one record, and the function that draws it."""
    for machine, record in load_records(DECODE).items():
        other = load_records(f"{DECODE}-4-bits").get(machine)
        yield RESULTS / DECODE / machine, partial(draw_speed, record, other=other)
    for machine, record in load_records(QUALITY).items():
        yield RESULTS / QUALITY / machine, partial(draw_quality, record)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "hf_hybrid_cache"  # the same record gives the same file
    for path, draw_into in drawings():
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        draw_into(axes)
        pictures.write(figure, path)
    for path, text in pages().items():
        path.write_text(text)
    for path in (*drawing.draw_all(), *pages()):
        print(f"written: {path.relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
