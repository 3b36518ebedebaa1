"""The text of `hf-hybrid-cache plan`: the answer first, then the code, then the table of all plans."""

import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table

from ..planning import Machine, Measured, Plan
from ..planning.candidates import BITS, RUNTIME_BYTES, Strategy
from ..planning.model_cost import ModelCost
from ..planning.plans import make_plans, recommendations, recommended, why_nothing_fits
from ..scalars import PREFILL_CHUNK_SIZE, duration_text
from .console import print_json, write

_LEGEND = {
    Strategy.BOTH: "as much as fits is on the GPU; of the rest the CPU attends to a part, the others are streamed",
    Strategy.STREAMED: "keys and values are in host memory, and visit the GPU layer by layer",
    Strategy.CPU_ATTENTION: "they are in host memory, and the CPU attends to them there",
}
# How often fewer bits change an answer, by the rank of the loss, see docs/quantized-cache.md and docs/weights.md.
_LOSSES = {
    0: "nothing is lost",
    1: "which hardly ever changes an answer",
    2: "which changes the wording of some answers",
}
_WANT_CALIBRATION = "4-bit weights want a calibrated model: docs/weights.md."


@dataclass(frozen=True)
class Report:
    """
    The plans for a model and a machine, as text.

    Args:
        cost: of the model.
        machine: its memory.
        plans: all of them.
        is_default_context: whether the context was not asked for.
        dtype: the type of the model that was asked for.
    """

    cost: ModelCost
    machine: Machine
    plans: list[Plan]
    is_default_context: bool
    dtype: str | None

    @cached_property
    def chosen(self) -> list[Plan]:
        """The recommended plans, the best first."""
        return recommendations(self.plans)

    def print_json(self, out: Console) -> None:
        """Print all plans, those that are recommended, and the bytes of experts."""
        shown = {
            "recommended": asdict(self.chosen[0]) if self.chosen else None,
            "alternatives": [asdict(each) for each in self.chosen[1:]],
            "plans": [asdict(each) for each in self.plans],
        }
        if (experts := self.cost.experts).num_bytes:
            shown["experts"] = {"total_bytes": experts.total_bytes()}
        print_json(out, shown)

    def print(self, out: Console) -> None:
        """Print the recommendation with its commands and code, the tables, and what they rest on."""
        # On a GPU codes of weights only make the CPU faster.
        shown = [
            each for each in self.plans if each.weights is None or each.strategy == Strategy.CPU or each in self.chosen
        ]
        write(out, "".join(f"{text}\n" for text in self._recommendations()))
        for on_host in (False, True):
            if rows := [each for each in shown if each.experts_on_host == on_host]:
                write(out, "\nWith experts in host memory:" * on_host + "\n")
                out.print(_table(rows, self.cost.held_bits or 8 * self.cost.dtype.itemsize))
        strategies = {each.strategy for each in shown}
        legend = [_filled(f"{name}: {text}.") for name, text in _LEGEND.items() if name in strategies]
        bits = "W: bits of a weight" + ", of experts" * bool(self.cost.experts.num_bytes) + "."
        write(out, "\n".join([bits, *legend, "", _filled(" ".join(self._remarks())), ""]))

    def _recommendations(self) -> Iterator[str]:
        """Yield the best plan and how to run it, and what the others gain and lose."""
        if not self.chosen:
            yield f"Nothing fits. {why_nothing_fits(self.cost, self.plans)}\n"
            return
        best, default = self.chosen[0], ", the default of --context" if self.is_default_context else ""
        farthest = f"up to {best.longest_context:,} fit"
        yield _filled(f"{self.cost.name} with {best.context:,} tokens{default}; {farthest}")
        yield _filled(f"Recommended: {plan_name(best)}. {_speed(best)}It takes {_memory(best)}.")
        if self.machine.device_bytes and best.strategy == Strategy.CPU:
            yield _filled(f"The GPU is not used: {self._why_not_on_the_gpu()}")
        if command := self._command(best):
            yield f"\n{command}"
        yield f"\n{best.code}"
        known = best.code.splitlines()
        for other in self.chosen[1:]:
            gained = f"Or {plan_name(other)}, {_LOSSES[other.loss]}. {_speed(other)}It takes {_memory(other)}."
            yield f"\n{_filled(gained)}"
            yield self._command(other) or "\n".join(line for line in other.code.splitlines() if line not in known)
        if any(each.weights == 4 for each in self.chosen):
            yield f"\n{_WANT_CALIBRATION}"

    def _why_not_on_the_gpu(self) -> str:
        """Say what plans with the model on the GPU lack, and which weights of another library would fit there."""
        model, context = self.cost, self.chosen[0].context
        if on_gpu := [plan for plan in self.plans if plan.strategy != Strategy.CPU]:
            nearest = min(on_gpu, key=lambda plan: plan.short_device_bytes + plan.short_host_bytes)
            short = {"GPU": nearest.short_device_bytes, "host": nearest.short_host_bytes}
            missing = " and ".join(f"{_gibibytes(size)} GiB of {where} memory" for where, size in short.items() if size)
            why = f"the plan there that is nearest ({plan_name(nearest)}) is short of {missing}."
        else:
            needed = model.weight_bytes + model.least_working_bytes + RUNTIME_BYTES
            why = (
                f"with weights as they are, a chunk of the prompt and the process, {_gibibytes(needed)} GiB would be "
                "there before any keys and values."
            )
        for bits in () if model.comes_quantized else sorted(model.quantized_weights, reverse=True):
            few = replace(model, weight_bytes=model.quantized_weights[bits].num_bytes, quantized_weights={})
            fitting = recommended(make_plans(few, context, self.machine))
            if fitting is not None and fitting.strategy != Strategy.CPU:
                states = "as they are" if BITS.get(fitting.cache) is None else f"in {BITS[fitting.cache]} bits"
                return (
                    f"{why} Weights in {bits} bits of another library (bitsandbytes, GPTQ), about "
                    f"{_gibibytes(few.weight_bytes)} GiB, fit there, with keys and values {states} "
                    f"({fitting.cache}, {fitting.strategy}): see docs/weights.md."
                )
        return why

    def _command(self, plan: Plan) -> str | None:
        """The command that runs a plan; `None` where only Python can."""
        bits = BITS.get(plan.cache)
        of_cache = [] if bits is None else [f"--bits {bits}"]
        options = {
            Strategy.CPU: of_cache + ["--device cpu"] * (self.machine.device_bytes > 0),
            Strategy.GPU: of_cache,
            Strategy.STREAMED: ["--cache offloaded"] if bits is None else None,
            Strategy.CPU_ATTENTION: [*of_cache, "--cpu-decode yes"],
        }.get(plan.strategy)
        if options is None or (self.cost.batch, self.cost.chunk) != (1, PREFILL_CHUNK_SIZE):
            return None
        if plan.experts_on_host:
            options = [*options, "--experts host"]
        if plan.weights is not None:
            options = [*options, f"--weights {plan.weights}"]
        options += [f"--dtype {self.dtype}"] * (self.dtype is not None) + ["--cache stock"] * (plan.cache == "stock")
        name = shlex.quote(self.cost.name)
        return " ".join(["hf-hybrid-cache generate --model", name, *options, '--document FILE --question "..."'])

    def _remarks(self) -> list[str]:
        """Sentences that say what memory is calculated from, and what was measured."""
        cost, machine = self.cost, self.machine
        context = self.plans[0].context
        weights, working, runtime = map(_gibibytes, (cost.weight_bytes, cost.working_bytes(context), RUNTIME_BYTES))
        if cost.held_bits is not None:
            weights = f"in {cost.held_bits} bits of another library, which must be there, about {weights}"
        remarks = [
            f"{_gibibytes(machine.device_bytes)} GiB of GPU memory and {_gibibytes(machine.host_bytes)} of host memory "
            f"are there. Weights take {weights} GiB, a chunk of {cost.chunk:,} tokens of the prompt {working}, the "
            f"process {runtime} of each memory. Caches take within 3% of what is said."
        ]
        if (experts := cost.experts).num_bytes:
            others = _gibibytes(cost.without_experts().weight_bytes)
            remarks.append(f"Experts take {_gibibytes(experts.total_bytes())} GiB, other weights {others}.")
        if layers := {plan.measured.layers for plan in self.plans if plan.measured is not None}:
            remarks.append(f"Times were measured here, beside whatever else runs, with {max(layers)} of the layers.")
        elif cost.held_bits is None:
            remarks.append("No times were measured: --measure does it, on this machine, in some 20 seconds a plan.")
        if not cost.shapes:
            remarks.append("No layer has full attention over the whole context: these caches save no memory.")
        return remarks


def _speed(plan: Plan) -> str:
    """A sentence that says how fast a plan was measured to be, and a space; nothing if it was not."""
    if plan.measured is None:
        return ""
    first = duration_text(plan.measured.seconds_to_first_token)
    return f"The first token comes after {first}, the others at {_rate(plan.measured)} tokens/s. "


def plan_name(plan: Plan) -> str:
    """The weights and the cache of a plan, and the places of both."""
    weights, states = (f"in {bits} bits" if bits else "as they are" for bits in (plan.weights, BITS.get(plan.cache)))
    what = f"weights, keys and values {states}" if weights == states else f"weights {weights}, keys and values {states}"
    if plan.experts_on_host:
        what = f"experts {weights} in host memory, keys and values {states}"
    return f"{what} ({plan.cache}, {plan.strategy})"


def _memory(plan: Plan) -> str:
    """The memory that a plan takes of each kind that there is."""
    host = f"{_gibibytes(plan.host_bytes)} GiB of host memory"
    return f"{_gibibytes(plan.device_bytes)} GiB of GPU memory and {host}" if plan.device_bytes else host


def _table(plans: list[Plan], bits_as_is: int) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("cache", overflow="fold")
    table.add_column("")
    are_measured = any(plan.measured for plan in plans)
    times = ("first\ntoken", "tokens/s") if are_measured else ()
    for heading in ("W", "GPU\nGiB", "host\nGiB", "short of\nGiB", "longest\ncontext", *times):
        table.add_column(heading, justify="right")
    for plan in plans:
        short = {"GPU": plan.short_device_bytes, "host": plan.short_host_bytes}
        measured = plan.measured
        took = ("-", "-") if measured is None else (duration_text(measured.seconds_to_first_token), _rate(measured))
        table.add_row(
            plan.cache,
            plan.strategy,
            str(plan.weights or bits_as_is),
            _gibibytes(plan.device_bytes),
            _gibibytes(plan.host_bytes),
            "\n".join(f"{_gibibytes(missing)} {where}" for where, missing in short.items() if missing) or "fits",
            f"{plan.longest_context:,}",
            *took[: len(times)],
        )
    return table


def _filled(text: str) -> str:
    width = min(80, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _rate(measured: Measured) -> str:
    tokens_per_second = 1 / measured.seconds_per_token
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 1 else f"{tokens_per_second:.2g}"
