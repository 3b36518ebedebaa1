"""Write the results of GPUs into the pages of the project, and draw their figures, from records only."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.common import pictures
from experiments.common.records import RESULTS
from experiments.gpu.answers import answers, table
from experiments.gpu.found import FOLDER, MachineRecords, committed_records, decode_steps

README, RESULTS_PAGE = RESULTS.parent / "README.md", RESULTS.parent / "docs" / "results.md"
# The results stand between these marks in each page.
START, END = "<!-- measured on a GPU -->", "<!-- end -->"
# A figure of all would be hard to read.
_DRAWN = ("stock", "dynamic", "codes-4", "codes-2", "stock-offloaded", "offloaded", "streamed-4", "quanto-4", "hqq-4")


def write_all() -> Iterator[Path]:
    """Draw the figures and write what was measured into the pages; the paths of what was written."""
    found = committed_records()
    for machine, records in found.items():
        if decode_steps(records):
            pictures.write(figure(records), FOLDER / machine)
            yield (FOLDER / machine).with_suffix(".svg")
    for path, said in pages(found):
        path.write_text(written(path.read_text(), said))
        yield path


def pages(found: Mapping[str, MachineRecords]) -> Iterator[tuple[Path, str]]:
    """Yield the path of each page that describes GPUs, and its new text."""
    if not found:
        yield (
            README,
            "Nothing has been measured on a GPU yet: what needs one has tests, which skip where there is none.\n",
        )
        yield RESULTS_PAGE, "**Nothing has been measured on a GPU yet.** `make gpu` does it.\n"
        return
    cards = ", ".join(sorted({str(_environment(records)["gpu"]) for records in found.values()}))
    yield README, f"What was measured on a GPU ({cards}) stands in [the results](docs/results.md#on-a-gpu).\n"
    yield RESULTS_PAGE, "\n".join(_section(machine, records) for machine, records in found.items())


def written(text: str, said: str) -> str:
    """
    A page with what is said of GPUs in its place.

    Raises:
        ValueError: the page has no such place.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"there must be {START!r} and {END!r} after it")
    return f"{before}{START}\n{said}{END}{after}"


def decode_table(found: MachineRecords) -> str:
    """Milliseconds of a token by context, in Markdown."""
    measured = _seconds(found)
    contexts = sorted({context for at in measured.values() for context in at})
    lines = [
        f"| milliseconds a token | {' | '.join(f'{context:,}' for context in contexts)} |",
        f"|---|{'---:|' * len(contexts)}",
    ]
    for name, at in measured.items():
        row = (f"{at[context] * 1e3:,.2f}" if context in at else "" for context in contexts)
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def figure(found: MachineRecords) -> Figure:
    """Milliseconds of a token by context."""
    drawn, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    measured = _seconds(found)
    for name in _DRAWN:
        if at := measured.get(name):
            contexts = sorted(at)
            axes.plot(contexts, [at[context] * 1e3 for context in contexts], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("milliseconds a token, whole model")
    axes.set_title(f"Llama-3.2-1B shape, bfloat16, {_environment(found)['gpu']}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def _seconds(found: MachineRecords) -> dict[str, dict[int, float]]:
    """Return the seconds of a token by cache and context, the largest that was measured."""
    measured: dict[str, dict[int, float]] = {}
    for record in decode_steps(found):
        for cache, seconds in record["median_seconds"].items():
            name = f"{cache}, without cuDNN" if record.get("without_cudnn") else cache
            at = measured.setdefault(name, {})
            at[record["context_tokens"]] = max(seconds, at.get(record["context_tokens"], seconds))
    return measured


def _section(machine: str, found: MachineRecords) -> str:
    where = _environment(found)
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    parts = [
        f"**{where['gpu']}**, driver {where['gpu_driver']}, bus (generation of PCIe, lanes) {where['gpu_bus']}; "
        f"{where['cpu']}, {where['cores']} cores; {versions}. Records: `results/gpu/*/{machine}.json`.\n",
        table(answers(found)),
    ]
    if decode_steps(found):
        parts += [f"![Time a token by context](../results/gpu/{machine}.png)\n", decode_table(found)]
    return "\n".join(parts)


def _environment(found: MachineRecords) -> dict[str, Any]:
    environment: dict[str, Any] = next(iter(found.values()))["environment"]
    return environment
