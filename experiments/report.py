"""Figures, and the page of the sweep, from committed records and never from a new measurement."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from experiments.common import pictures
from experiments.common.records import RESULTS
from experiments.gpu.page import write_all
from experiments.sweep.drawing import draw_all

# Okabe and Ito's palette, whose colours the colour-blind can tell apart.
STOCK_COLOUR, OUR_COLOUR, OTHER_COLOUR, CEILING_COLOUR = "#D55E00", "#0072B2", "#CC79A7", "#666666"


@dataclass(frozen=True)
class Plot:
    """
    A figure of times against tokens, ours and stock.

    Attributes:
        records: folder in `results` that it is drawn from.
        tokens_key: of a cell, on the x axis.
        x_label: of that axis.
        y_label: of the other one.
        our_label: of our curve.
        also: another folder, whose curve of ours is drawn as well, with its own ratio to stock; `None` for none.
        also_label: of that curve.
    """

    records: str
    tokens_key: str
    x_label: str
    y_label: str
    our_label: str = "DynamicHybridCache"
    also: str | None = None
    also_label: str = ""


PLOTS = (
    Plot("append_cost", "tokens", "tokens stored", "milliseconds for one more, one layer"),
    Plot(
        "decode_speed/llama-3.2-1b-random",
        "context_tokens",
        "context, tokens",
        "milliseconds a token, whole model",
        also="decode_speed/llama-3.2-1b-random-4-bits",
        also_label="QuantizedHybridCache(bits=4)",
    ),
    Plot(
        "decode_speed/llama-3.2-1b-random-4-bits",
        "context_tokens",
        "context, tokens",
        "milliseconds a token, whole model",
        "QuantizedHybridCache(bits=4)",
    ),
)
QUALITY = "quality/perplexity"
Drawing = Callable[[dict[str, Any], Axes], None]
# Worse than this is no use, and would press everything else together.
_MOST_DIVERGENCE = 1.0


def load_records(folder: str) -> dict[str, dict[str, Any]]:
    """Records in a folder of `results`, by machine."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))}


def draw(plot: Plot, record: dict[str, Any], axes: Axes, other: dict[str, Any] | None = None) -> None:
    """Medians of ours and stock, with their ratio above each length, and the ceiling where the record has one."""
    cells = sorted(record["cells"], key=lambda cell: cell[plot.tokens_key])
    tokens = [cell[plot.tokens_key] for cell in cells]
    curves = (
        ("stock", "transformers DynamicCache", STOCK_COLOUR, "s"),
        ("ours", plot.our_label, OUR_COLOUR, "o"),
    )
    for key, label, colour, marker in curves:
        medians = [cell["median_seconds"][key] * 1e3 for cell in cells]
        axes.plot(tokens, medians, marker=marker, color=colour, label=label)
    if other is not None:
        beside = sorted(other["cells"], key=lambda cell: cell[plot.tokens_key])
        medians = [cell["median_seconds"]["ours"] * 1e3 for cell in beside]
        places = [cell[plot.tokens_key] for cell in beside]
        axes.plot(places, medians, marker="P", color=OTHER_COLOUR, label=plot.also_label)
        for cell, place, median in zip(beside, places, medians, strict=True):
            offset = partial(axes.annotate, xytext=(0, -16), textcoords="offset points", ha="center")
            offset(_times(cell["ratio"]), (place, median), color=OTHER_COLOUR)
    if all("ceiling_seconds" in cell for cell in cells):
        ceilings = [cell["ceiling_seconds"] * 1e3 for cell in cells]
        axes.plot(tokens, ceilings, "--", color=CEILING_COLOUR, label="reading weights and KV once")
    for cell in cells:
        highest = max(cell["median_seconds"][key] for key, *_ in curves) * 1e3
        highest_point = (cell[plot.tokens_key], highest)
        axes.annotate(_times(cell["ratio"]), highest_point, xytext=(0, 8), textcoords="offset points", ha="center")
    axes.margins(y=0.12)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.set_title("Llama-3.2-1B shape, bfloat16, on the CPU", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def draw_quality(record: dict[str, Any], axes: Axes) -> None:
    """Divergence from full precision against stored bytes, in the largest window; nearer to the corner is better."""
    windows = [cell for cell in record["cells"] if cell["measure"] == "perplexity"]
    cell = max(windows, key=lambda cell: cell["window_tokens"])
    rows = {name: row for name, row in cell["caches"].items() if not name.endswith(("-rotated", "-plain"))}
    shown = {name: row for name, row in rows.items() if 0 < row["kl_nats"] < _MOST_DIVERGENCE}
    for name, row in shown.items():
        ours = name.startswith("ours")
        place = (row["share_of_bfloat16"], row["kl_nats"])
        axes.plot(*place, marker="o" if ours else "s", color=OUR_COLOUR if ours else STOCK_COLOUR)
        axes.annotate(name, place, xytext=(6, 3), textcoords="offset points", fontsize=9)
    left_out = [name for name, row in rows.items() if row["kl_nats"] >= _MOST_DIVERGENCE]
    axes.set_yscale("log")
    axes.margins(x=0.15, y=0.12)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(
        "bytes held, of a bfloat16 cache" + (f" (beyond the scale: {', '.join(left_out)})" if left_out else "")
    )
    axes.set_ylabel("KL divergence from full precision, nats")
    tokens = cell["stored_tokens"]
    axes.set_title(f"SmolLM2-135M, English text, {tokens:,} tokens, decoded in steps", fontsize=11)
    axes.grid(alpha=0.3)


def save(draw_packed: Drawing, record: dict[str, Any], path: Path) -> None:
    """Write what `draw_packed` draws of a record as SVG and PNG."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw_packed(record, axes)
    pictures.write(figure, path)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "hf_hybrid_cache"  # the same record gives the same file
    drawings: list[tuple[str, str, Drawing]] = [
        (plot.records, machine, partial(draw, plot, other=load_records(plot.also).get(machine) if plot.also else None))
        for plot in PLOTS
        for machine in load_records(plot.records)
    ]
    drawings += [(QUALITY, machine, draw_quality) for machine in load_records(QUALITY)]
    for folder, machine, draw_packed in drawings:
        path = RESULTS / folder / machine
        save(draw_packed, load_records(folder)[machine], path)
        print(f"drawn: {path.with_suffix('.svg').relative_to(RESULTS.parent)}")
    for path in (*draw_all(), *write_all()):
        print(f"written: {path.relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
