"""The data of figures and page: the records of one machine, all samples of a context together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.sweep.store import Cell

Curve = tuple[str, str]  # cache, decode device


@dataclass(frozen=True)
class Point:
    """
    One cache at one context: the steps of all repeats and numbers of new tokens pooled.

    Attributes:
        context_tokens: prompt and new tokens.
        step_seconds: of each token but the first.
        ttft_seconds: median of the real prefills; None without one.
        kv_bytes: held at the end.
        weight_bytes: of the model, read by each step.
        host_bytes: peak over the model; None where it is not known.
        read_rate: bytes a second of host memory in the same processes, median.
    """

    context_tokens: int
    step_seconds: tuple[float, ...]
    ttft_seconds: float | None
    kv_bytes: int
    weight_bytes: int
    host_bytes: int | None
    read_rate: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.step_seconds) / sum(self.step_seconds)

    def latency(self, share: float) -> float:
        """Seconds a token, of which `share` percent take no longer."""
        return float(np.percentile(self.step_seconds, share))

    def roof(self, read_rate: float) -> float:
        """Tokens a second if weights, keys and values were read once, at `read_rate`."""
        return read_rate / (self.weight_bytes + self.kv_bytes)


def points(found: Iterable[dict[str, Any]]) -> dict[Curve, list[Point]]:
    """Group measured records by cache and decode device, contexts ascending."""
    groups: dict[tuple[Curve, int], list[dict[str, Any]]] = defaultdict(list)
    for record in found:
        cell = Cell.from_record(record)
        if record["result"]["status"] == "measured":
            groups[(cell.cache, cell.decode_device), cell.context_tokens].append(record)
    curves: dict[Curve, list[Point]] = defaultdict(list)
    for curve, context in sorted(groups):
        results = [record["result"] for record in groups[curve, context]]
        environments = [record["environment"] for record in groups[curve, context]]
        prefills = [result["ttft_seconds"] for result in results if result["ttft_seconds"] is not None]
        curves[curve].append(
            Point(
                context,
                tuple(seconds for result in results for seconds in result["step_seconds"]),
                float(np.median(prefills)) if prefills else None,
                results[0]["kv_bytes"],
                results[0]["weight_bytes"],
                max(filter(None, (result["peak_bytes"]["host_over_model"] for result in results)), default=None),
                float(np.median([environment["read_bytes_per_second"] for environment in environments])),
            )
        )
    return dict(curves)


def read_rate(curves: Mapping[Curve, list[Point]]) -> float:
    """Bytes a second of host memory, the median of all points: each by itself has the noise of its minute."""
    return float(np.median([point.read_rate for found in curves.values() for point in found]))


def shortages(found: Iterable[dict[str, Any]]) -> dict[Curve, int]:
    """The shortest context for which memory did not suffice, by cache and decode device."""
    first: dict[Curve, int] = {}
    for record in found:
        cell = Cell.from_record(record)
        if record["result"]["status"] == "out of memory":
            curve = cell.cache, cell.decode_device
            first[curve] = min(cell.context_tokens, first.get(curve, cell.context_tokens))
    return first
