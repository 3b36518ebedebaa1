"""`results/README.md`: the records of the context sweep in words and tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.sweep.caches import CPU, GPU
from experiments.sweep.figures import DEVICES, LABELS, cpu_to_gpu, has_gpu
from experiments.sweep.points import Curve, Point, points, read_rate, shortages
from experiments.sweep.source import HYPOTHESIS, TABLE_1

GIB = 2**30
LONG_CONTEXT = 8192
Curves = Mapping[Curve, list[Point]]
OURS = (
    *("dynamic", "quantized-8", "quantized-4", "quantized-2"),
    *("dynamic-weights-8", "dynamic-weights-4", "quantized-4-weights-4"),
)

HEAD = """# The context sweep

Written by `python -m experiments.report` from the records in `context_sweep`, one file a cell with raw
samples and the environment; `summary.csv` beside them has a line for each. `make sweep` (or `make sweep-gpu`) measures
again. Other measurements have folders of their own here.
"""


def page(
    machines: Mapping[str, list[dict[str, Any]]],
    figures: Mapping[str, Sequence[Path]],
) -> str:
    """
    The text.

    Args:
        machines: records of the sweep.
        figures: by machine, relative to the page.
    """
    parts = [HEAD]
    curves = {machine: points(found) for machine, found in machines.items()}
    if not any(map(has_gpu, curves.values())):
        parts.append(
            "**There is no record of a GPU yet.** What compares a CPU with a GPU is left open below, and drawn by the "
            "same command once there is one.\n"
        )
    for machine, found in machines.items():
        if curves[machine]:
            parts += _machine(machine, found, curves[machine], figures.get(machine, ()))
    return "\n".join(parts)


def _machine(machine: str, found: list[dict[str, Any]], curves: Curves, figures: Sequence[Path]) -> Iterable[str]:
    yield f"## {machine}\n"
    yield _environment(found)
    yield from (f"- {finding}" for finding in findings(curves))
    yield ""
    yield from (f"![{path.stem.replace('_', ' ')}]({path.as_posix()})\n" for path in figures)
    yield "### Tokens a second\n"
    yield _by_context(curves, lambda point: f"{point.tokens_per_second:.2f}")
    yield "### Milliseconds a token, 99th percentile\n"
    yield _by_context(curves, lambda point: f"{point.latency(99) * 1e3:,.0f}")
    yield "### Seconds to the first token, where the prefill was real\n"
    yield _by_context(curves, lambda point: "" if point.ttft_seconds is None else f"{point.ttft_seconds:.2f}")
    yield "### MiB of keys and values\n"
    yield _by_context(curves, lambda point: f"{point.kv_bytes / 2**20:,.1f}")
    yield "### MiB of host memory over the model, at the peak\n"
    yield _by_context(curves, lambda point: "" if point.host_bytes is None else f"{point.host_bytes / 2**20:,.0f}")
    if short := shortages(found):
        yield "### Out of memory\n"
        yield from (f"- {label(curve)}: from {context:,} tokens on" for curve, context in sorted(short.items()))
        yield ""
    yield "### Beside the source's Table 1\n"
    yield _table_1(curves)
    yield hypothesis(curves) + "\n"


def label(curve: Curve) -> str:
    name, device = curve
    return f"{LABELS[name]}, {DEVICES[device]}"


def _first_token(stock: Mapping[int, Point], ours: Mapping[int, Point], name: str) -> Iterable[str]:
    """Yield a sentence on the time of the longest prompt that both caches have read, if it is long."""
    real = [
        context
        for context in stock.keys() & ours.keys()
        if context >= LONG_CONTEXT and stock[context].ttft_seconds and ours[context].ttft_seconds
    ]
    if real:
        context = max(real)
        yield (
            f"{name}: the first token of {context:,} comes after {ours[context].ttft_seconds:.0f} s, with "
            f"transformers' DynamicCache after {stock[context].ttft_seconds:.0f} s."
        )


def findings(curves: Curves) -> Iterable[str]:
    """Yield sentences on our caches beside transformers', at the longest context of both."""
    rate = read_rate(curves)
    for device in DEVICES:
        stock = _at_contexts(curves.get(("stock", device), []))
        for name in OURS:
            ours = _at_contexts(curves.get((name, device), []))
            if both := stock.keys() & ours.keys():
                context = max(both)
                share = ours[context].kv_bytes / stock[context].kv_bytes
                roof = ours[context].tokens_per_second / ours[context].roof(rate)
                beside = f", {roof:.0%} of the roof" if device == CPU else ""
                yield (
                    f"{label((name, device))}, at {context:,} tokens: {ours[context].tokens_per_second:.2f} tokens/s"
                    f"{beside}, with {share:.0%} of the keys and values of transformers' DynamicCache, which makes "
                    f"{stock[context].tokens_per_second:.2f}."
                )
            yield from _first_token(stock, ours, label((name, device)))
        quanto, ours = (_at_contexts(curves.get((name, device), [])) for name in ("quanto-4", "quantized-4"))
        if both := quanto.keys() & ours.keys():
            context = max(both)
            ratio = ours[context].tokens_per_second / quanto[context].tokens_per_second
            yield f"Both in 4 bits, at {context:,} tokens: {ratio:.1f} times transformers' QuantizedCache with quanto."


def hypothesis(curves: Curves) -> str:
    """Yield sentences that test the source's hypothesis against the records."""
    ratios = {
        context: share for name in ("dynamic", "quantized-4") for context, share in cpu_to_gpu(curves, name).items()
    }
    if not ratios:
        return (
            f"The source's hypothesis, that {HYPOTHESIS}, needs both on one machine; here there is only the CPU. The "
            "lines above say what that side reaches."
        )
    longest = {device: max(_at_contexts(curves[curve])) for curve in curves for device in [curve[1]]}
    lowest, highest = min(ratios.values()), max(ratios.values())
    return (
        f"The source's hypothesis, that {HYPOTHESIS}: the longest context is {longest[GPU]:,} tokens on the GPU and "
        f"{longest[CPU]:,} on the CPU, at {lowest:.2f} to {highest:.2f} of the throughput."
    )


def _environment(found: list[dict[str, Any]]) -> str:
    environments = [record["environment"] for record in found]
    last = max(environments, key=lambda environment: environment["date"])
    rates = sorted(rate for environment in environments if (rate := environment.get("read_bytes_per_second")))
    dates = sorted(environment["date"][:10] for environment in environments)
    models = ", ".join(sorted({record["cell"]["model"] for record in found}))
    middle = rates[len(rates) // 2] / 1e9
    has_synthetic = any(record["cell"]["prefill"] == "synthetic" for record in found)
    return (
        f"{last['cpu']}, {last['cores']} cores, {last['threads']} threads, {last['memory_bytes'] / GIB:.0f} GiB, read "
        f"at {middle:.1f} GB/s (median of the cells, {rates[0] / 1e9:.1f} to {rates[-1] / 1e9:.1f}); GPU: "
        f"{last['gpu'] or 'none'}. {models}; torch {last['versions']['torch']}, transformers "
        f"{last['versions']['transformers']}; {dates[0]} to {dates[-1]}. Cells run one after the other, so the speed "
        "of a shared machine drifts between them: small differences mean nothing. How many times as fast ours are, "
        "with both taking turns, is in [the results](../docs/results.md)."
        + (" Long contexts have a synthetic prefill.\n" if has_synthetic else " All prompts are real.\n")
    )


def _by_context(curves: Curves, text: Callable[[Point], str]) -> str:
    rows = {curve: {point.context_tokens: text(point) for point in found} for curve, found in curves.items()}
    contexts = sorted({context for row in rows.values() for context, shown in row.items() if shown})
    order = [(name, device) for name in LABELS for device in DEVICES if (name, device) in rows]
    return _table(
        ["", *(f"{context:,}" for context in contexts)],
        [[label(curve), *(rows[curve].get(context, "") for context in contexts)] for curve in order],
    )


def _table_1(curves: Curves) -> str:
    rows = []
    for row in TABLE_1:
        ours = _at_contexts(curves.get((row.cache, row.decode_device), [])).get(row.context_tokens)
        theirs = "out of memory" if row.tokens_per_second is None else f"{row.tokens_per_second:.2f}"
        place = f"{row.cache}, {DEVICES[row.decode_device]}"
        rows.append(
            [f"{row.context_tokens:,}", place, theirs, "no record" if ours is None else f"{ours.tokens_per_second:.2f}"]
        )
    return _table(["context", "cache", "source, tokens/s (RTX 6000, Xeon)", "here"], rows)


def _at_contexts(found: Iterable[Point]) -> dict[int, Point]:
    return {point.context_tokens: point for point in found}


def _table(headings: list[str], rows: Iterable[list[str]]) -> str:
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
