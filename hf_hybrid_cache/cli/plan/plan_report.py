"""`hf-hybrid-cache plan`: which cache suits a model and a machine, before anything is loaded."""

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ...attention import compile_kernels
from ...durations import duration_text
from ...models import load_config
from ...planning import Machine, Plan, default_chunk, make_plans, model_cost, this_machine
from ...planning.calibration import calibrate
from ...planning.candidates import RUNTIME_BYTES
from ...planning.machine import DeviceSpeed, Speeds, SpeedsFileError, WeightSpeed, load_speeds, save_speeds
from ...planning.model_cost import ModelCost
from ...planning.plans import farthest, has_room, missing_for_weights, much_faster, recommendations, with_2_bits
from ...planning.prediction import Strategy
from ...weights import WEIGHT_BITS
from ..console import note
from .experts_report import experts_heading, experts_read, experts_table
from .plan_options import PlanOptions

_LEGEND = {
    Strategy.STREAMED: "keys and values are in host memory, and visit the GPU layer by layer",
    Strategy.CPU_ATTENTION: "they are in host memory, and the CPU attends to them there",
    Strategy.CPU_DECODE: "the GPU reads the prompt, the CPU does all that follows",
    Strategy.BOTH: "as much as fits is on the GPU; of the rest the CPU attends to a part, the others are streamed",
}
# The share of answers that a quantized cache changes, see docs/quantized-cache.md.
_LOSSES = {
    "quantized-8": ("8 bits", "which hardly ever change an answer"),
    "quantized-4": ("4 bits", "which seldom change an answer"),
}
_WANT_CALIBRATION = "4-bit weights want a calibrated model: docs/weights.md."


def report(options: PlanOptions, out: Console, notes: Console) -> None:
    """
    Print the plans for a model and a machine, and recommend one.

    Args:
        options: of the command.
        out: receives the plans.
        notes: receives remarks.

    Raises:
        CostError: the model's costs cannot be computed.
        PlanError: no plan can be made.
        typer.Exit: nothing fits; the exit code is 1.
    """
    config = load_config(options.model)
    memory = this_machine(options.gpu_memory, options.host_memory)
    chunk = options.prefill_chunk_size or default_chunk(memory.device_bytes > 0)
    cost = replace(model_cost(config, options.dtype, options.batch_size, chunk), continuations=options.continuations)
    machine = replace(memory, speeds=_speeds(cost.dtype, options, notes))
    plans = make_plans(cost, options.context or cost.max_context, machine)
    chosen = recommendations(plans)
    if options.as_json:
        _print_json(cost, plans, chosen, out)
    else:
        _print_plans(cost, machine, plans, chosen, out)
        _note_speeds(cost, plans, options, notes)
    if not chosen:
        raise typer.Exit(1)


def _print_json(cost: ModelCost, plans: Sequence[Plan], chosen: Sequence[Plan], out: Console) -> None:
    """Print all plans, those that are recommended, and what is read of experts."""
    shown = {
        "recommended": asdict(chosen[0]) if chosen else None,
        "alternatives": [asdict(each) for each in chosen[1:]],
        "plans": [asdict(each) for each in plans],
    }
    if cost.experts.layers:
        shown["experts"] = experts_read(cost)
    out.print(json.dumps(shown, indent=1), markup=False, highlight=False)


def _note_speeds(cost: ModelCost, plans: Sequence[Plan], options: PlanOptions, notes: Console) -> None:
    """Remark which speeds are not known, and which are only bandwidths."""
    if cost.continuations > 1:
        note(notes, "Speeds of sequences that continue one prompt are not predicted: only their memory is.")
    elif cost.shapes and not cost.has_kernel:
        note(notes, "The attention of this model is of a kind that is not measured: its speeds are not known.")
    elif any(each.seconds_per_token is None for each in plans if each.weights is None):
        note(notes, "Speeds are not known where there is a dash: run with --calibrate, or give bandwidths (--help).")
    elif any(each.seconds_per_token is None for each in plans):
        note(notes, "Speeds with quantized weights are not known: run with --calibrate.")
    if options.host_bandwidth or options.gpu_bandwidth or options.bus_bandwidth:
        note(notes, "Speeds are those of reading at the bandwidths given: real ones are lower.")


def _reading_at(bytes_per_second: float) -> DeviceSpeed:
    """The speed of a CPU that reads everything, quantized weights too, at one bandwidth."""
    return DeviceSpeed(
        bytes_per_second, quantized_weights={bits: WeightSpeed(bytes_per_second) for bits in WEIGHT_BITS}
    )


def _speeds(dtype: torch.dtype, options: PlanOptions, notes: Console) -> Speeds:
    """The speeds of this machine as far as they are known, except where the options give bandwidths."""
    speeds = _measured_speeds(dtype, options.calibrate, notes)
    return Speeds(
        _reading_at(options.host_bandwidth) if options.host_bandwidth else speeds.host,
        DeviceSpeed(options.gpu_bandwidth) if options.gpu_bandwidth else speeds.device,
        options.bus_bandwidth or speeds.bus_bytes_per_second,
        speeds.round_trip_seconds,
    )


def _measured_speeds(dtype: torch.dtype, measure: bool, notes: Console) -> Speeds:
    """Measure the speeds of this machine now, or load those that were measured before."""
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
    """Print the model, the machine, tables of plans, and the recommendation."""
    _print_costs(cost, machine, plans, out)
    all_on_gpu, moved = has_room(cost, machine), has_room(cost.without_experts(), machine)
    if machine.device_bytes and not all_on_gpu:
        where = "experts are in host memory" if moved else "everything is on the CPU"
        _say(out, f"The weights do not fit the GPU: {where}.")
    if not cost.shapes:
        _say(out, "No layer has full attention over the whole context: these caches change nothing.")
    kinds = [(False, None), (bool(chosen) and chosen[0].experts_on_host, chosen[0].weights if chosen else None)]
    if moved and not all_on_gpu:
        kinds.insert(0, (True, None))
    _print_tables(plans, list(dict.fromkeys(kinds)), out)
    if chosen:
        _print_recommendation(plans, chosen, out)
    else:
        _print_nearest(cost, machine, plans, out)


def _print_costs(cost: ModelCost, machine: Machine, plans: Sequence[Plan], out: Console) -> None:
    """Print what the model takes, and what the machine has."""
    precision = str(cost.dtype).removeprefix("torch.")
    _say(out, f"{cost.name} in {precision}: {_gibibytes(cost.weight_bytes)} GiB of weights")
    context, working = plans[0].context, _gibibytes(cost.working_bytes(plans[0].context))
    _say(out, f"{context:,} tokens, the prompt in chunks of {cost.chunk:,}, which take {working} GiB besides")
    if cost.continuations > 1:
        own = context - cost.prompt_tokens(context)
        _say(out, f"{cost.continuations} sequences continue one prompt; the last {own} tokens are each one's own")
    _say(
        out,
        f"{_gibibytes(machine.device_bytes)} GiB of GPU memory, {_gibibytes(machine.host_bytes)} GiB of host memory; "
        f"{_gibibytes(RUNTIME_BYTES)} GiB of each for the process",
    )
    if cost.experts.layers:
        _say(out, experts_heading(cost))
        out.print(experts_table(cost))
        _say(out, "on average, if tokens choose each expert equally often, and for each token anew\n")


def _print_tables(plans: Sequence[Plan], kinds: Sequence[tuple[bool, int | None]], out: Console) -> None:
    """Print a table for each kind of weights, and a legend; a kind is experts on the host, and bits of weights."""
    in_tables: list[Plan] = []
    for kind in kinds:
        if table := [each for each in plans if (each.experts_on_host, each.weights) == kind]:
            if kind != (False, None):
                _say(out, _kind(*kind) + ":")
            elif len({each.experts_on_host for each in plans}) > 1:
                _say(out, "With all in one place:")
            out.print(_table(table))
            in_tables += table
    strategies = {each.strategy for each in in_tables}
    if legend := [f"{strategy}: {text}." for strategy, text in _LEGEND.items() if strategy in strategies]:
        _say(out, "\n".join([*map(_filled, legend), ""]))


def _print_nearest(cost: ModelCost, machine: Machine, plans: Sequence[Plan], out: Console) -> None:
    """Print the plan that is nearest to fitting, where none fits without a loss."""
    nearest = farthest(plans)
    if smaller := with_2_bits(plans):
        _say(
            out,
            f"Only 2 bits fit, which often change an answer: {_name(smaller)}. A shorter context loses nothing.\n\n"
            f"{smaller.code}",
        )
    elif not nearest.longest_context and (missing := missing_for_weights(cost, machine.host_bytes)):
        _say(out, f"Nothing fits. {missing}.")
    else:
        _say(out, f"Nothing fits. {_name(nearest)} goes farthest, up to {nearest.longest_context:,} tokens.")


def _print_recommendation(plans: Sequence[Plan], chosen: Sequence[Plan], out: Console) -> None:
    """Print the code of the best plan, and of its alternatives."""
    best = chosen[0]
    _say(out, f"Recommended: {_name(best)}\n\n{best.code}")
    for other in chosen[1:]:
        _say(out, f"\n{_alternative(other, best)}\n\n{_lines_that_differ(other, best)}")
    if (faster := much_faster(plans, best)) is not None:
        fraction = (faster.seconds_per_token or 0.0) / (best.seconds_per_token or 1.0)
        what = "experts" if faster.experts_on_host else "weights"
        _say(
            out, f"\nWith {what} in {faster.weights} bits a token takes {fraction:.2f} of the time. {_WANT_CALIBRATION}"
        )
    elif best.weights == min(WEIGHT_BITS):
        _say(out, f"\n{_WANT_CALIBRATION}")


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, emoji=False)


def _alternative(other: Plan, best: Plan) -> str:
    """Describe what another plan gains and loses."""
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
    """The lines of code of a plan that the best plan lacks."""
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
            plan.strategy,
            _gibibytes(plan.device_bytes),
            _gibibytes(plan.host_bytes),
            "\n".join(f"{_gibibytes(missing)} {where}" for where, missing in short.items() if missing) or "fits",
            "-" if plan.seconds_per_token is None else _rate(1 / plan.seconds_per_token),
            "-" if plan.seconds_to_first_token is None else duration_text(plan.seconds_to_first_token),
            f"{plan.longest_context:,}",
        )
    return table


def _kind(experts_on_host: bool, bits: int | None) -> str:
    """Name the weights that are in host memory, or quantized."""
    if not experts_on_host:
        return f"With weights in {bits} bits"
    return "With experts in host memory" + ("" if bits is None else f", in {bits} bits")


def _name(plan: Plan) -> str:
    if plan.experts_on_host or plan.weights is not None:
        kind = _kind(plan.experts_on_host, plan.weights).removeprefix("With ")
        return f"{plan.cache}, {plan.strategy}, {kind}"
    return f"{plan.cache}, {plan.strategy}"


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 1 else f"{tokens_per_second:.2g}"
