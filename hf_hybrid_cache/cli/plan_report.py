"""`hf-hybrid-cache plan`: which cache a model and a machine go well with, before anything is loaded."""

import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..attention import compile_kernels
from ..models import load_config
from ..planning import (
    RUNTIME_BYTES,
    WEIGHT_BITS,
    DeviceSpeed,
    Machine,
    ModelCost,
    Plan,
    Speeds,
    SpeedsFileError,
    Way,
    WeightSpeed,
    default_chunk,
    farthest,
    has_room,
    load_speeds,
    make_plans,
    missing_for_weights,
    model_cost,
    much_faster,
    parse_bandwidth,
    parse_bytes,
    parse_tokens,
    recommendations,
    save_speeds,
    this_machine,
    with_2_bits,
)
from ..planning.calibration import calibrate
from .console import UsageError, dtype_of, exit_codes, note
from .experts_report import experts_heading, experts_read, experts_table

_T = TypeVar("_T")
_LEGEND = {
    Way.STREAMED: "keys and values are in host memory, and visit the GPU layer by layer",
    Way.CPU_ATTENTION: "they are in host memory, and the CPU attends to them there",
    Way.CPU_DECODE: "the GPU reads the prompt, the CPU does all that follows",
    Way.BOTH: "as much as fits is on the GPU; of the rest the CPU attends to a part, the others are streamed",
}
# Of caches: what docs/few-bits.md says.
_LOSSES = {
    "quantized-8": ("8 bits", "which hardly ever change an answer"),
    "quantized-4": ("4 bits", "which seldom change an answer"),
}
_WANT_CALIBRATION = "4-bit weights want a calibrated model: docs/weights.md."


def report(
    *,
    model: str,
    context: str | None,
    gpu_memory: str | None,
    host_memory: str | None,
    dtype: str | None,
    batch_size: int,
    prefill_chunk_size: int | None,
    calibrate_first: bool,
    host_bandwidth: str | None,
    gpu_bandwidth: str | None,
    bus_bandwidth: str | None,
    as_json: bool,
) -> None:
    """Do what `plan` says with these options."""
    out, notes = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    with exit_codes(notes):
        precision = dtype_of(dtype)
        device_bytes = _parsed("--gpu-memory", gpu_memory, _parse_memory)
        host_bytes = _parsed("--host-memory", host_memory, _parse_memory)
        host_rate = _parsed("--host-bandwidth", host_bandwidth, parse_bandwidth)
        device_rate = _parsed("--gpu-bandwidth", gpu_bandwidth, parse_bandwidth)
        bus_rate = _parsed("--bus-bandwidth", bus_bandwidth, parse_bandwidth)
        num_tokens = _parsed("--context", context, parse_tokens)

        config = load_config(model)
        memory = this_machine(device_bytes, host_bytes)
        cost = model_cost(config, precision, batch_size, prefill_chunk_size or default_chunk(memory.device_bytes > 0))
        speeds = _speeds(cost.dtype, calibrate_first, notes)
        speeds = Speeds(
            _reading_at(host_rate) if host_rate else speeds.host,
            DeviceSpeed(device_rate) if device_rate else speeds.device,
            bus_rate or speeds.bus_bytes_per_second,
            speeds.round_trip_seconds,
        )
        machine = replace(memory, speeds=speeds)
        plans = make_plans(cost, num_tokens or cost.max_context, machine)
        chosen = recommendations(plans)
        best = next(iter(chosen), None)
        if as_json:
            shown = {
                "recommended": best and asdict(best),
                "alternatives": [asdict(each) for each in chosen[1:]],
                "plans": [asdict(each) for each in plans],
            }
            if cost.experts.layers:
                shown["experts"] = experts_read(cost)
            out.print(json.dumps(shown, indent=1), markup=False, highlight=False)
            return
        _print_plans(cost, machine, plans, chosen, out)
        if cost.shapes and not cost.has_kernel:
            note(notes, "The attention of this model is of a kind that is not measured: its speeds are not known.")
        elif any(each.seconds_per_token is None for each in plans if each.weights is None):
            note(
                notes, "Speeds are not known where there is a dash: run with --calibrate, or give bandwidths (--help)."
            )
        elif any(each.seconds_per_token is None for each in plans):
            note(notes, "Speeds with weights of few bits are not known: run with --calibrate.")
        if host_rate or device_rate or bus_rate:
            note(notes, "Speeds are those of reading at the bandwidths given: real ones are lower.")
        if best is None:
            raise typer.Exit(1)


def _parsed(option: str, value: str | None, parse: Callable[[str], _T]) -> _T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _reading_at(bytes_per_second: float) -> DeviceSpeed:
    """A CPU that reads everything, codes of weights too, at one bandwidth."""
    return DeviceSpeed(bytes_per_second, coded_weights={bits: WeightSpeed(bytes_per_second) for bits in WEIGHT_BITS})


def _parse_memory(size: str) -> int:
    num_bytes = parse_bytes(size)
    if 0 < num_bytes < 2**20:
        meant = f" Write {size.strip()}GiB if these are gibibytes." if size.strip().isdigit() else ""
        raise ValueError(f"{size} is {num_bytes:,} bytes, which is less than 1MiB.{meant}")
    return num_bytes


def _speeds(dtype: torch.dtype, measure: bool, notes: Console) -> Speeds:
    """The speeds of this machine, as far as they are known."""
    if measure:
        note(notes, "measuring the speeds of this machine; let nothing else run meanwhile")
        compile_kernels(dtype, True, lambda: note(notes, "compiling kernels, once on this machine"))
        start = time.perf_counter()
        measured = calibrate(dtype)
        speeds, doubt = measured.speeds, measured.doubt
        took = f"took {time.perf_counter() - start:.0f} s"
        if doubt is not None:
            note(notes, f"{took}; not kept, because {doubt}: speeds may be higher than what follows. Try again.")
            return speeds
        try:
            note(notes, f"{took}; kept in {save_speeds(dtype, speeds)}")
        except OSError as error:
            note(notes, f"{took}; not kept: {error}")
        return speeds
    try:
        return load_speeds(dtype)
    except SpeedsFileError as error:
        note(notes, str(error))
        return Speeds()


def _print_plans(
    cost: ModelCost, machine: Machine, plans: Sequence[Plan], chosen: Sequence[Plan], out: Console
) -> None:
    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False, emoji=False)

    best = next(iter(chosen), None)
    precision = str(cost.dtype).removeprefix("torch.")
    say(f"{cost.name} in {precision}: {_gibibytes(cost.weight_bytes)} GiB of weights")
    context, working = plans[0].context, _gibibytes(cost.working_bytes(plans[0].context))
    say(f"{context:,} tokens, the prompt in chunks of {cost.chunk:,}, which take {working} GiB besides")
    say(
        f"{_gibibytes(machine.device_bytes)} GiB of GPU memory, {_gibibytes(machine.host_bytes)} GiB of host memory; "
        f"{_gibibytes(RUNTIME_BYTES)} GiB of each for the process"
    )
    if cost.experts.layers:
        say(experts_heading(cost))
        out.print(experts_table(cost))
        say("on average, if tokens choose each expert equally often, and for each token anew\n")
    all_on_gpu, moved = has_room(cost, machine), has_room(cost.without_experts(), machine)
    if machine.device_bytes and not all_on_gpu:
        where = "experts are in host memory" if moved else "everything is on the CPU"
        say(f"The weights do not fit the GPU: {where}.")
    if not cost.shapes:
        say("No layer has full attention over the whole context: these caches change nothing.")
    bits = None if best is None else best.weights
    shown = [(False, None), (best is not None and best.experts_on_host, bits)]
    if moved and not all_on_gpu:
        shown.insert(0, (True, None))
    in_tables = []
    for kind in dict.fromkeys(shown):
        if table := [each for each in plans if (each.experts_on_host, each.weights) == kind]:
            if kind != (False, None):
                say(_kind(*kind) + ":")
            elif len({each.experts_on_host for each in plans}) > 1:
                say("With all in one place:")
            out.print(_table(table))
            in_tables += table
    if legend := [f"{way}: {text}." for way, text in _LEGEND.items() if way in {each.way for each in in_tables}]:
        say("\n".join([*map(_filled, legend), ""]))
    if best is None:
        nearest = farthest(plans)
        if smaller := with_2_bits(plans):
            say(
                f"Only 2 bits fit, which often change an answer: {_name(smaller)}. A shorter context loses nothing.\n\n"
                f"{smaller.code}"
            )
        elif not nearest.longest_context and (missing := missing_for_weights(cost, machine.host_bytes)):
            say(f"Nothing fits. {missing}.")
        else:
            say(f"Nothing fits. {_name(nearest)} goes farthest, up to {nearest.longest_context:,} tokens.")
        return
    say(f"Recommended: {_name(best)}\n\n{best.code}")
    for other in chosen[1:]:
        say(f"\n{_alternative(other, best)}\n\n{_lines_that_differ(other, best)}")
    if (faster := much_faster(plans, best)) is not None:
        share = (faster.seconds_per_token or 0.0) / (best.seconds_per_token or 1.0)
        what = "experts" if faster.experts_on_host else "weights"
        say(f"\nWith {what} in {faster.weights} bits a token takes {share:.2f} of the time. {_WANT_CALIBRATION}")
    elif bits == min(WEIGHT_BITS):
        say(f"\n{_WANT_CALIBRATION}")


def _alternative(other: Plan, best: Plan) -> str:
    """What another plan gains and loses."""
    bits, loss = _LOSSES.get(other.cache, ("full precision", "nothing is lost"))
    gains = []
    if other.seconds_per_token is not None and best.seconds_per_token is not None:
        gains.append(f"{_rate(1 / other.seconds_per_token)} tokens/s instead of {_rate(1 / best.seconds_per_token)}")
    if other.longest_context != best.longest_context:
        gains.append(f"up to {other.longest_context:,} tokens instead of {best.longest_context:,}")
    sizes = (each.kv_device_bytes + each.kv_host_bytes for each in (other, best))
    gains.append("keys and values {} GiB instead of {}".format(*map(_gibibytes, sizes)))
    return "\n".join(map(_filled, (f"Or in {bits}, {loss}: {_name(other)}", ", ".join(gains))))


def _filled(text: str) -> str:
    return textwrap.fill(text, 80, break_on_hyphens=False)


def _lines_that_differ(other: Plan, best: Plan) -> str:
    """Of the code."""
    known = best.code.splitlines()
    return "\n".join(line for line in other.code.splitlines() if line not in known)


def _table(plans: Sequence[Plan]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("cache")
    table.add_column("")
    for heading in ("GPU\nGiB", "host\nGiB", "short of\nGiB", "tokens/s", "first\ntoken", "longest\ncontext"):
        table.add_column(heading, justify="right")
    for plan in plans:
        short = {"GPU": plan.short_device_bytes, "host": plan.short_host_bytes}
        table.add_row(
            plan.cache,
            plan.way,
            _gibibytes(plan.device_bytes),
            _gibibytes(plan.host_bytes),
            "\n".join(f"{_gibibytes(missing)} {where}" for where, missing in short.items() if missing) or "fits",
            "-" if plan.seconds_per_token is None else _rate(1 / plan.seconds_per_token),
            "-" if plan.seconds_to_first_token is None else _duration(plan.seconds_to_first_token),
            f"{plan.longest_context:,}",
        )
    return table


def _kind(experts_on_host: bool, bits: int | None) -> str:
    """Which weights are elsewhere, or in few bits."""
    if not experts_on_host:
        return f"With weights in {bits} bits"
    return "With experts in host memory" + ("" if bits is None else f", in {bits} bits")


def _name(plan: Plan) -> str:
    if plan.experts_on_host or plan.weights is not None:
        kind = _kind(plan.experts_on_host, plan.weights).removeprefix("With ")
        return f"{plan.cache}, {plan.way}, {kind}"
    return f"{plan.cache}, {plan.way}"


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 1 else f"{tokens_per_second:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
