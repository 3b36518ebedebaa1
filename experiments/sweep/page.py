"""`results/README.md`: the records of the context sweep in words and tables."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.common.records import RESULTS
from experiments.sweep import store
from experiments.sweep.caches import CPU
from experiments.sweep.drawing import DEVICES, STYLES, Curves, figures_of, label
from experiments.sweep.points import Point, points, read_rate, shortages

PAGE = RESULTS / "README.md"
HEAD = """# The context sweep

Written by `python -m experiments.report` from the records in `context_sweep`, one file a cell with raw
samples and the environment; `summary.csv` beside them has a line for each. `make sweep` (or `make sweep-gpu`) measures
again. Other measurements have folders of their own here.

Cells run one after the other, so the speed of a shared machine drifts between them: small differences mean nothing. How
many times as fast ours are, with both taking turns, is in [the results](../docs/results.md).
"""
TABLES: dict[str, Callable[[Point], str]] = {
    "Tokens a second": lambda point: f"{point.tokens_per_second:.2f}",
    "Milliseconds a token, 99th percentile": lambda point: f"{point.latency(99) * 1e3:,.0f}",
    "Seconds to the first token, where the prefill was real": lambda point: (
        "" if point.ttft_seconds is None else f"{point.ttft_seconds:.2f}"
    ),
    "MiB of keys and values": lambda point: f"{point.kv_bytes / 2**20:,.1f}",
    "MiB of host memory over the model, at the peak": lambda point: (
        "" if point.host_bytes is None else f"{point.host_bytes / 2**20:,.0f}"
    ),
}


def page(machines: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the text about the records of all machines."""
    return "\n".join([HEAD, *(part for machine, found in machines.items() for part in _machine(machine, found))])


def _machine(machine: str, found: list[dict[str, Any]]) -> Iterable[str]:
    curves = points(found)
    if not curves:
        return
    yield f"## {machine}\n"
    yield f"{_environment(found)}\n"
    yield from (f"- {finding}" for finding in findings(curves))
    yield ""
    folder = store.FOLDER.relative_to(PAGE.parent).as_posix()
    for name in figures_of(found):
        yield f"![{name.replace('_', ' ')}]({folder}/{machine}/{name}.png)\n"
    for title, text in TABLES.items():
        yield f"### {title}\n"
        yield _by_context(curves, text)
    if short := shortages(found):
        yield "### Out of memory\n"
        yield from (f"- {label(curve)}: from {context:,} tokens on" for curve, context in sorted(short.items()))
        yield ""


def findings(curves: Curves) -> Iterable[str]:
    """Yield sentences on ours beside transformers' at the longest context of both."""
    rate = read_rate(curves)
    at = {curve: {point.context_tokens: point for point in found} for curve, found in curves.items()}
    for (name, device), ours in sorted(at.items(), key=lambda item: list(STYLES).index(item[0][0])):
        stock = at.get(("stock", device), {})
        if name.startswith(("dynamic", "quantized")) and (both := stock.keys() & ours.keys()):
            point, other = ours[max(both)], stock[max(both)]
            roof = f", {point.tokens_per_second / point.roof(rate):.0%} of the roof" if device == CPU else ""
            share = point.kv_bytes / other.kv_bytes
            yield (
                f"{label((name, device))}, at {max(both):,} tokens: {point.tokens_per_second:.2f} tokens/s{roof}, with "
                f"{share:.0%} of the keys and values of transformers' DynamicCache, which makes "
                f"{other.tokens_per_second:.2f}."
            )


def _environment(found: list[dict[str, Any]]) -> str:
    environments = [record["environment"] for record in found]
    last = max(environments, key=lambda environment: environment["date"])
    rates = sorted(rate for environment in environments if (rate := environment.get("read_bytes_per_second")))
    dates = sorted(environment["date"][:10] for environment in environments)
    models = ", ".join(sorted({record["cell"]["model"] for record in found}))
    has_synthetic = any(record["cell"]["prefill"] == "synthetic" for record in found)
    return (
        f"{last['cpu']}, {last['cores']} cores, {last['threads']} threads, {last['memory_bytes'] / 2**30:.0f} GiB, "
        f"read at {rates[len(rates) // 2] / 1e9:.1f} GB/s (median of the cells, {rates[0] / 1e9:.1f} to "
        f"{rates[-1] / 1e9:.1f}); GPU: {last['gpu'] or 'none'}. {models}; torch {last['versions']['torch']}, "
        f"transformers {last['versions']['transformers']}; {dates[0]} to {dates[-1]}. "
        f"{'Long contexts have a synthetic prefill.' if has_synthetic else 'All prompts are real.'}"
    )


def _by_context(curves: Curves, text: Callable[[Point], str]) -> str:
    rows = {curve: {point.context_tokens: text(point) for point in found} for curve, found in curves.items()}
    contexts = sorted({context for row in rows.values() for context, shown in row.items() if shown})
    lines = [["", *(f"{context:,}" for context in contexts)], ["---"] + ["---:"] * len(contexts)]
    for curve in ((name, device) for name in STYLES for device in DEVICES):
        if curve in rows:
            lines.append([label(curve), *(rows[curve].get(context, "") for context in contexts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
