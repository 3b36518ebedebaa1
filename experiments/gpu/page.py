"""The results of GPUs in words and tables, from records only."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.common.records import RESULTS

FOLDER = RESULTS / "gpu"
TO_BEAT = "To beat: KTransformers' 27.5 tokens/s at 131,072 tokens (24 GB GPU, 64 threads, approximate attention)."
Records = list[dict[str, Any]]
Choose = Callable[[float, float], float]


def found_in(folder: Path, machine: str) -> Records:
    """Load the records of one machine."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*/{machine}.json"))]


def committed() -> dict[str, Records]:
    """Load the committed records, by machine."""
    return {machine: found_in(FOLDER, machine) for machine in sorted({path.stem for path in FOLDER.glob("*/*.json")})}


def tables(found: Records) -> str:
    """Milliseconds of a token by context, and what else is known of each cache, in Markdown."""
    parts: list[str] = []
    for model in dict.fromkeys(record["model"] for record in found if "median_seconds" in record):
        of_it = [record for record in found if record.get("model") == model]
        parts += _table(f"{model}, milliseconds a token", of_it, "median_seconds", lambda value: f"{value * 1e3:,.2f}")
        rates = [record for record in of_it if "kv_bytes_per_second" in record]
        parts += _table("GB/s of keys and values", rates, "kv_bytes_per_second", lambda value: f"{value / 1e9:,.1f}")
        parts += [TO_BEAT, ""] if "8B" in model else []
        parts += _table("peak of the device, MiB", rates, "step_peak_bytes", lambda value: f"{value / 2**20:,.0f}")
    shares = [record for record in found if "share_of_bus" in record]
    parts += _table("of a plain copy's rate", shares, "share_of_bus", lambda value: f"{value:.0%}", min)
    for run in (run for record in found for run in record.get("runs", ())):
        failed = len(run["failed"])
        parts.append(f"`{run['tests']}`: {run['passed']:,} passed, {failed} failed with {run['transformers']}.")
    return "\n".join(parts) + "\n"


def values(found: Records, figure: str, choose: Choose) -> dict[str, dict[int, float]]:
    """Return a figure by cache and context; the largest, or another choice, where several records have it."""
    kinds = {bool(record.get("without_cudnn")) for record in found}
    by_cache: dict[str, dict[int, float]] = {}
    for record in sorted((each for each in found if figure in each), key=lambda each: each["context_tokens"]):
        for cache, value in record[figure].items():
            name = f"{cache}, without cuDNN" if len(kinds) > 1 and record.get("without_cudnn") else cache
            if value is not None:
                at = by_cache.setdefault(name, {})
                at[record["context_tokens"]] = choose(value, at.get(record["context_tokens"], value))
    return by_cache


def _table(
    title: str, found: Records, figure: str, form: Callable[[float], str], choose: Choose = max
) -> Iterator[str]:
    by_cache = values(found, figure, choose)
    contexts = sorted({context for at in by_cache.values() for context in at})
    if not contexts:
        return
    yield f"| {title} | {' | '.join(f'{context:,}' for context in contexts)} |"
    yield f"|---|{'---:|' * len(contexts)}"
    for name, at in by_cache.items():
        yield f"| {name} | {' | '.join(form(at[context]) if context in at else '' for context in contexts)} |"
    yield ""


def section(machine: str, found: Records) -> str:
    """Return the part of the page that is about one machine."""
    where = found[0]["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"**{where['gpu']}**, driver {where['gpu_driver']}, bus (generation of PCIe, lanes) {where['gpu_bus']}; "
        f"{where['cpu']}, {where['cores']} cores; {versions}. Records: `results/gpu/*/{machine}.json`.\n\n"
        f"{tables(found)}"
    )
