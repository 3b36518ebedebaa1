"""Figures from the committed records, never from a new measurement: `python -m experiments.report`."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from experiments.records import RESULTS

# Okabe and Ito's palette, whose colours the colour-blind can tell apart.
STOCK_COLOUR, OUR_COLOUR = "#D55E00", "#0072B2"


def load_records(experiment: str) -> dict[str, dict[str, Any]]:
    """Records of `experiment` by machine."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / experiment).glob("*.json"))}


def draw_append_cost(record: dict[str, Any], path: Path) -> None:
    """Time of a one-token update by tokens stored, ours and stock, with the ratio at each length."""
    cells = sorted(record["cells"], key=lambda cell: cell["tokens"])
    tokens = [cell["tokens"] for cell in cells]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves = (
        ("stock", "transformers DynamicCache", STOCK_COLOUR, "s"),
        ("ours", "DynamicHybridCache", OUR_COLOUR, "o"),
    )
    for key, label, colour, marker in curves:
        medians = [cell["median_seconds"][key] * 1e3 for cell in cells]
        axes.plot(tokens, medians, marker=marker, color=colour, label=label)
    for cell in cells:
        middle = (cell["median_seconds"]["stock"] * cell["median_seconds"]["ours"]) ** 0.5 * 1e3
        axes.annotate(f"{cell['ratio']:,.0f}x", (cell["tokens"], middle), ha="center", va="center")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens stored")
    axes.set_ylabel("milliseconds for one more, one layer")
    axes.set_title("Llama-3.2-1B shape, bfloat16, on the CPU", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "hf_hybrid_cache"  # the same record gives the same file
    for machine, record in load_records("append_cost").items():
        path = RESULTS / "append_cost" / machine
        draw_append_cost(record, path)
        print(f"drawn: {path.with_suffix('.svg').relative_to(RESULTS.parent)}")


if __name__ == "__main__":
    main()
