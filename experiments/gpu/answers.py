"""The aims for a machine with a GPU, and the results of its records for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.gpu.found import MachineRecords, decode_steps

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Answer:
    """
    An aim, and the measured figure for it.

    Attributes:
        figure: what is measured.
        aim: what it should be.
        measured: what it is; `None` where there is no record of it.
        is_met: whether it is as it should be.
    """

    figure: str
    aim: str
    measured: str | None
    is_met: bool


def answers(found: MachineRecords) -> list[Answer]:
    """Return the answer to each aim, in order."""
    return [answer(found) for answer in _ANSWERS]


def table(found: Sequence[Answer]) -> str:
    """Format the answers as a Markdown table."""
    lines = ["| figure | aim | measured |", "|---|---|---|"]
    for answer in found:
        measured = NOT_MEASURED if answer.measured is None else answer.measured + ("" if answer.is_met else " (missed)")
        lines.append(f"| {answer.figure} | {answer.aim} | {measured} |")
    return "\n".join(lines) + "\n"


def _is_long(context: int) -> bool:
    return context > 100_000


def _tests(found: MachineRecords) -> Answer:
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in found.get("suites", {"runs": []})["runs"]:
        runs.setdefault(run["transformers"], []).append(run)
    counts = {
        version: (sum(run["passed"] for run in some), sum(len(run["failed"]) for run in some))
        for version, some in runs.items()
    }
    shown = "; ".join(
        f"{passed} passed, {failed} failed with {version}" for version, (passed, failed) in counts.items()
    )
    # A run that crashed has no tests that failed, and one that was stopped is not there.
    are_whole = len({len(some) for some in runs.values()}) == 1
    are_whole &= all(run["passed"] and run["exit_status"] == 0 for some in runs.values() for run in some)
    passes = len(counts) >= 2 and are_whole and not any(failed for _, failed in counts.values())
    has_run = any(passed or failed for passed, failed in counts.values())  # and not only skipped
    return Answer("tests that need a GPU, two versions of transformers", "pass", shown if has_run else None, passes)


def _ratio(
    figure: str, pair: str, least: float, aim: str, contexts: Callable[[int], bool]
) -> Callable[[MachineRecords], Answer]:
    """Return a function that finds the least ratio of a pair at some contexts."""

    def answer(found: MachineRecords) -> Answer:
        ratios = _least(found, lambda record: record["ratios"].get(pair), contexts)
        return Answer(figure, aim, _at_each(ratios, "{:.2f}x"), bool(ratios) and min(ratios.values()) >= least)

    return answer


def _bus(found: MachineRecords) -> Answer:
    shares = _least(found, lambda record: record["share_of_bus"].get("offloaded"))
    return Answer(
        "streaming, of a plain pinned copy's rate",
        "85%",
        _at_each(shares, "{:.0%}"),
        bool(shares) and min(shares.values()) >= 0.85,
    )


def _few_bytes(found: MachineRecords) -> Answer:
    def share(record: dict[str, Any]) -> float | None:
        kept = record["memory"].get("codes-4")
        return None if kept is None else kept["device_bytes"] / record["bfloat16_kv_bytes"]

    shares = _least(found, share, _is_long)
    return Answer(
        "4 bits resident, bytes by `memory()` of bfloat16's",
        "28%",
        _at_each(shares, "{:.1%}"),
        bool(shares) and max(shares.values()) < 0.285,
    )


def _cpu_attention(found: MachineRecords) -> Answer:
    def speed(record: dict[str, Any]) -> float | None:
        """Return the tokens a second with the fastest number of threads."""
        turns = record["tokens_per_second"].items()
        return max((value for name, value in turns if name.startswith("cpu-attention-4")), default=None)

    speeds = _least(found, speed, _is_long)
    cores = {record["environment"]["cores"] for record in decode_steps(found)}
    shown = _at_each(speeds, "{:.1f}")
    return Answer(
        "attention on the CPU in 4 bits, tokens a second",
        "20 at 131,072, with 16 cores",
        None if shown is None else f"{shown} ({', '.join(map(str, cores))} cores)",
        bool(speeds) and min(speeds.values()) >= 20,
    )


def _decode_on_cpu(found: MachineRecords) -> Answer:
    held = found.get("peaks", {}).get("decode_on_cpu", {}).get("allocated_bytes")
    return Answer(
        "device memory during DecodeOnCPU",
        "64 MiB at most",
        None if held is None else f"{held / 2**20:.1f} MiB",
        held is not None and held <= 64 * 2**20,
    )


def _prefill(found: MachineRecords) -> Answer:
    prefill = found.get("peaks", {}).get("prefill", {})
    above = prefill.get("above_expected")
    return Answer(
        "peak of an offloaded prefill, over weights, 2 layers and activations",
        "5% at most",
        None if above is None else f"{above:+.1%} at {prefill['context_tokens']:,}",
        above is not None and above <= 0.05,
    )


_ANSWERS: tuple[Callable[[MachineRecords], Answer], ...] = (
    _tests,
    _ratio("streaming, against transformers' offloading", "offloaded / stock-offloaded", 3, "3x", lambda _: True),
    _bus,
    _ratio(
        "4 bits streamed, against bfloat16 streamed", "streamed-4 / offloaded", 3, "3x", lambda context: context > 2**15
    ),
    _ratio("4 bits resident, against bfloat16 resident", "codes-4 / dynamic", 1, "1x", _is_long),
    _few_bytes,
    _cpu_attention,
    _ratio(
        "half of the tokens on the device, the CPU attends to the others: against streaming all",
        "half-cpu-attention / offloaded",
        1,
        "1x",
        lambda _: True,
    ),
    _ratio(
        "the same against attention on the CPU to all",
        "half-cpu-attention / cpu-attention",
        1,
        "1x",
        lambda _: True,
    ),
    _decode_on_cpu,
    _prefill,
)


def _least(
    found: MachineRecords,
    figure: Callable[[dict[str, Any]], float | None],
    contexts: Callable[[int], bool] = lambda _: True,
) -> dict[int, float]:
    """Return, by context, the least value of a figure that several steps may have measured."""
    least: dict[int, float] = {}
    for record in decode_steps(found):
        value, context = figure(record), record["context_tokens"]
        if value is not None and contexts(context):
            least[context] = min(value, least.get(context, value))
    return least


def _at_each(figures: Mapping[int, float], form: str) -> str | None:
    """Format figures by context; `None` where there are none."""
    return ", ".join(f"{form.format(value)} at {context:,}" for context, value in sorted(figures.items())) or None
