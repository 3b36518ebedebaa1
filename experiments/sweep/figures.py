"""The figures of the context sweep, from points only."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.sweep.caches import CPU, CPU_ATTENTION, GPU
from experiments.sweep.points import Curve, Point, read_rate

Curves = Mapping[Curve, list[Point]]

# Okabe and Ito's palette; caches that share a colour differ in their markers.
STYLES: dict[str, dict[str, Any]] = {
    "stock": {"color": "#D55E00", "marker": "s"},
    "stock-offloaded": {"color": "#D55E00", "marker": "v"},
    "quanto-4": {"color": "#E69F00", "marker": "D"},
    "dynamic": {"color": "#0072B2", "marker": "o"},
    "offloaded": {"color": "#56B4E9", "marker": "^"},
    "quantized-8": {"color": "#009E73", "marker": "o"},
    "quantized-4": {"color": "#CC79A7", "marker": "P"},
    "quantized-2": {"color": "#000000", "marker": "X"},
    "quantized-4-offloaded": {"color": "#CC79A7", "marker": "v"},
    "dynamic-weights-8": {"color": "#0072B2", "marker": "<"},
    "dynamic-weights-4": {"color": "#0072B2", "marker": ">"},
    "quantized-4-weights-4": {"color": "#CC79A7", "marker": ">"},
}
LABELS = {
    "stock": "transformers DynamicCache",
    "stock-offloaded": "transformers, offloaded",
    "quanto-4": "transformers QuantizedCache, quanto 4 bits",
    "dynamic": "DynamicHybridCache",
    "offloaded": "OffloadedHybridCache",
    "quantized-8": "QuantizedHybridCache, 8 bits",
    "quantized-4": "QuantizedHybridCache, 4 bits",
    "quantized-2": "QuantizedHybridCache, 2 bits",
    "quantized-4-offloaded": "the same, 4 bits, offloaded",
    "dynamic-weights-8": "DynamicHybridCache, weights in 8 bits",
    "dynamic-weights-4": "DynamicHybridCache, weights in 4 bits",
    "quantized-4-weights-4": "QuantizedHybridCache and weights, 4 bits",
}
DEVICES = {GPU: "on the GPU", CPU_ATTENTION: "attention on the CPU", CPU: "decode on the CPU"}
_LINES = {GPU: "-", CPU_ATTENTION: "--", CPU: ":"}
_ROOF_COLOUR = "#666666"
MIB = 2**20


def throughput(curves: Curves, title: str) -> Figure:
    """Tokens a second by context, with the roofs of reading everything once."""
    figure, axes = _axes("tokens a second", f"Speed of decoding\n{title}")
    _draw(axes, curves, lambda point: point.tokens_per_second)
    rate = read_rate(curves)
    for name, style in (("stock", "--"), ("quantized-4", "-.")):
        if roof := curves.get((name, CPU)):
            label = "roof: reading weights and " + ("bfloat16 KV" if name == "stock" else "4-bit KV") + " once"
            axes.plot(
                [point.context_tokens for point in roof],
                [point.roof(rate) for point in roof],
                style,
                color=_ROOF_COLOUR,
                label=label,
            )
    return _finished(figure, axes, curves)


def latency(curves: Curves, title: str) -> Figure:
    """The 99th percentile of the time of a token by context."""
    figure, axes = _axes("milliseconds a token, 99th percentile", f"Time of the slowest tokens\n{title}")
    _draw(axes, curves, lambda point: point.latency(99) * 1e3)
    return _finished(figure, axes, curves)


def first_token(curves: Curves, title: str) -> Figure:
    """Seconds to the first token by context, where the prefill was real."""
    real = {curve: [point for point in found if point.ttft_seconds is not None] for curve, found in curves.items()}
    figure, axes = _axes("seconds to the first token", f"Time to the first token\n{title}")
    _draw(axes, real, lambda point: point.ttft_seconds or 0.0)
    return _finished(figure, axes, real)


def memory(curves: Curves, limit_bytes: int, limit_label: str, title: str) -> Figure:
    """Keys and values by context, and what there is room for."""
    figure, axes = _axes("MiB of keys and values", f"Memory of keys and values\n{title}")
    _draw(axes, curves, lambda point: point.kv_bytes / MIB)
    axes.axhline(limit_bytes / MIB, color=_ROOF_COLOUR, linestyle="--", label=limit_label)
    return _finished(figure, axes, curves)


def memory_per_speed(curves: Curves, side: str, title: str) -> Figure:
    """MB of peak memory for each token a second; `side` is `host` or `device`."""
    figure, axes = _axes(f"{side} MB for each token/s", f"Peak of {side} memory for the speed\n{title}")
    _draw(axes, curves, lambda point: (getattr(point, f"{side}_bytes") or 0) / 1e6 / point.tokens_per_second)
    return _finished(figure, axes, curves)


def speed_ratio(curves: Curves, title: str) -> Figure:
    """Tokens a second with the whole decode phase on the CPU, for each of those on the GPU."""
    figure, axes = _axes("throughput of the CPU, of the GPU's", f"Decoding on the CPU beside the GPU\n{title}")
    ratios = {name: cpu_to_gpu(curves, name) for name, device in curves if device == CPU}
    for name, pairs in ratios.items():
        if pairs:
            axes.plot(list(pairs), list(pairs.values()), label=LABELS[name], **STYLES[name])
    axes.axhline(0.5, color=_ROOF_COLOUR, linestyle="--", label="half")
    return _finished(figure, axes, curves)


def cpu_to_gpu(curves: Curves, name: str) -> dict[int, float]:
    """Throughput of the whole decode phase on the CPU over that on the GPU, by context where both were measured."""
    gpu = {point.context_tokens: point.tokens_per_second for point in curves.get((name, GPU), [])}
    cpu = {point.context_tokens: point.tokens_per_second for point in curves.get((name, CPU), [])}
    return {context: cpu[context] / gpu[context] for context in sorted(cpu.keys() & gpu.keys())}


def has_gpu(curves: Iterable[Curve]) -> bool:
    return any(device != CPU for _, device in curves)


def _axes(y_label: str, title: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    return figure, axes


def _draw(axes: Axes, curves: Curves, value: Callable[[Point], float]) -> None:
    several = len({device for _, device in curves}) > 1
    for name, style in STYLES.items():
        for device, line in _LINES.items():
            if points := curves.get((name, device)):
                label = LABELS[name] + (f", {DEVICES[device]}" if several else "")
                contexts, values = [point.context_tokens for point in points], [value(point) for point in points]
                axes.plot(contexts, values, line if several else "-", label=label, markersize=5, **style)


def _finished(figure: Figure, axes: Axes, curves: Curves) -> Figure:
    contexts = sorted({point.context_tokens for found in curves.values() for point in found})
    axes.set_xticks(contexts)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", labelsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
