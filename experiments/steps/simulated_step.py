"""
The best place for tokens on other machines: decode steps simulated on GPU, bus and CPU.

Layers come one after the other. Each has its weights read by the GPU and attends to its tokens on the GPU, to some of
those in host memory on the CPU at the same time, and to the others on the GPU once those have crossed the bus; they are
fetched a layer ahead, as the cache does. CPU and bus read the same memory, and are slower while both do. Bandwidths are
published ones, of which a share is reached, and nothing else is known of these machines: what is simulated was not
measured. The division that the planner chooses is compared with fixed ones, and its prediction with the simulation; and
the share of the CPU is moved as the cache does it, also where machines are not as the planner believes.
"""

import argparse
import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common import records
from experiments.steps.published_machines import MACHINES, PublishedMachine
from hf_hybrid_cache import CacheStats, Placement
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import model_cost
from hf_hybrid_cache.planning.candidates import Candidate
from hf_hybrid_cache.planning.divided import divided_candidates, with_most_layers, with_most_tokens
from hf_hybrid_cache.planning.machine import Speeds
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan
from hf_hybrid_cache.planning.prediction import Division, Strategy, slowdown_of_both
from hf_hybrid_cache.storage import LEAST_CPU_FRACTION, CpuFraction

STEPS = 12
# The CPU fraction has settled after so many steps.
STEPS_OF_MOVES = 150
PREFETCH = 1
FULL, QUANTIZED = "offloaded", "quantized-4"
# A model, its context, sequences at once and a cache, that a machine has no room for on its GPU.
CASES: dict[str, list[tuple[str, int, int, str]]] = {
    MACHINES[0].name: [
        ("meta-llama/Llama-3.2-3B", 65_536, 1, FULL),
        ("meta-llama/Llama-3.2-3B", 131_072, 1, FULL),
        ("meta-llama/Llama-3.2-3B", 131_072, 1, QUANTIZED),
    ],
    MACHINES[1].name: [
        ("meta-llama/Llama-3.1-8B", 65_536, 1, FULL),
        ("meta-llama/Llama-3.1-8B", 131_072, 1, FULL),
        ("meta-llama/Llama-3.1-8B", 131_072, 2, QUANTIZED),
    ],
    MACHINES[2].name: [
        ("meta-llama/Llama-3.1-8B", 131_072, 6, FULL),
        ("Qwen/Qwen3-32B", 40_960, 4, FULL),
        ("Qwen/Qwen3-32B", 40_960, 6, QUANTIZED),
    ],
}
OURS = "divided by the planner"
# Times that a machine is as fast as the planner believes.
SURPRISES = {"as believed": (1.0, 1.0), "the bus half as fast": (0.5, 1.0), "the CPU half as fast": (1.0, 0.5)}


@dataclass(frozen=True)
class Layer:
    """
    The seconds of the operations of one layer in a step.

    Attributes:
        launch: until its operations are issued.
        weights: read by the GPU.
        on_device: attention there, to all that is there then.
        on_cpu: attention on the CPU; 0 for none.
        transfer: over the bus; 0 for none.
        round_trip: of the query to the CPU and the result back.
        slowdown: of CPU and bus while both read host memory.
    """

    launch: float
    weights: float
    on_device: float
    on_cpu: float = 0.0
    transfer: float = 0.0
    round_trip: float = 0.0
    slowdown: float = 1.0


# The operations of each layer in the step that is being prepared.
Layers = Callable[[int], Layer]


class HostMemory:
    """Read by the bus, for one layer after the other, and by the CPU."""

    def __init__(self) -> None:
        self._now = 0.0
        # A layer, the time from which on it may be transferred, and seconds left.
        self._transfers: deque[tuple[int, float, float]] = deque()
        self._arrived: dict[int, float] = {}

    def fetch(self, layer: int, after: float, seconds: float) -> None:
        """Transfer a layer, after those that are waiting."""
        self._transfers.append((layer, after, seconds))

    def arrival(self, layer: int) -> float:
        """Return the time at which a layer has arrived."""
        while layer not in self._arrived:
            _, after, left = self._transfers[0]
            self._pass(max(self._now, after), 0.0)
            self._pass(self._now + left, left)
        return self._arrived.pop(layer)

    def read_by_cpu(self, start: float, seconds: float, slowdown: float) -> float:
        """Return the time at which the CPU ends a read that begins at `start` and takes so many seconds alone."""
        while self._transfers and self._now < start:
            _, after, left = self._transfers[0]
            begin = max(self._now, after)
            if begin >= start:
                break
            end = min(start, begin + left)
            self._pass(end, end - begin)
        self._now = max(self._now, start)
        while seconds > 0 and self._transfers:
            _, after, left = self._transfers[0]
            if after > self._now:
                alone = min(seconds, after - self._now)
                self._now, seconds = self._now + alone, seconds - alone
            else:
                both = min(seconds, left)
                self._pass(self._now + both * slowdown, both)
                seconds -= both
        self._now += seconds
        return self._now

    def _pass(self, now: float, transferred: float) -> None:
        """Advance the time to `now`, with so many seconds of the first transfer done."""
        self._now = now
        if transferred:
            layer, after, left = self._transfers.popleft()
            if left - transferred > 1e-12:
                self._transfers.appendleft((layer, after, left - transferred))
            else:
                self._arrived[layer] = now


def simulated_steps(
    layers: Layers, num_layers: int, prefetch: int = PREFETCH, note: Callable[[bool], None] | None = None
) -> Iterator[float]:
    """
    Yield the seconds of one step after the other.

    Args:
        layers: what each does; asked when it is prepared.
        num_layers: how many there are.
        prefetch: layers that are fetched ahead.
        note: told, of each layer of which the CPU attends to a part, whether the CPU was the last to end.
    """
    memory = HostMemory()
    issued = device = before = 0.0
    prepared: dict[int, Layer] = {}
    # So few layers stay in the slots.
    stays = sum(layers(index).transfer > 0 for index in range(num_layers)) <= prefetch + 1

    def prepare(index: int) -> None:
        if index not in prepared:
            prepared[index] = layers(index)
            if prepared[index].transfer and not stays:
                memory.fetch(index, device, prepared[index].transfer)

    while True:
        for index in range(num_layers):
            prepare(index)
            layer = prepared.pop(index)
            issued += layer.launch
            device = max(device, issued) + layer.weights
            begun, ahead, following = device, 0, index
            while ahead < prefetch and (following := (following + 1) % num_layers) != index:
                prepare(following)
                ahead += prepared[following].transfer > 0
            joined = begun
            if layer.on_cpu:
                joined = memory.read_by_cpu(begun + layer.round_trip, layer.on_cpu, layer.slowdown)
            if layer.transfer and not stays:
                device = max(device, memory.arrival(index))
            device += layer.on_device
            if layer.on_cpu:
                if note is not None:
                    note(joined > device)
                device = max(device, joined)
                issued = max(issued, joined)  # the thread waits for the CPU's part
        yield device - before
        before = device


def simulated_seconds(layers: Sequence[Layer], prefetch: int = PREFETCH) -> float:
    """Return the seconds of a step once each is as the one before."""
    steps = simulated_steps(layers.__getitem__, len(layers), prefetch)
    return [next(steps) for _ in range(STEPS)][-1]


def layer_of(model: ModelCost, division: Division, cache: str, speeds: Speeds) -> Layer:
    """Return the operations of a layer with a divided cache, each token and weight read once."""
    assert speeds.device is not None
    assert speeds.host is not None
    assert speeds.bus_bytes_per_second is not None
    device, bus, share = speeds.device.weight_bytes_per_second, speeds.bus_bytes_per_second, division.cpu_fraction
    on_host, streamed = division.host_bytes * share, division.host_bytes * (1 - share)
    on_cpu = speeds.host.caches["dynamic" if cache == FULL else cache].step_seconds(on_host)
    return Layer(
        launch=speeds.device.layer_seconds,
        weights=model.step_weight_bytes / device / model.num_layers,
        on_device=(division.device_bytes + division.middle_bytes * (1 - share)) / device,
        on_cpu=on_cpu,
        transfer=streamed / bus,
        round_trip=speeds.round_trip_seconds,
        slowdown=slowdown_of_both(on_host / on_cpu, bus, speeds.host) if on_cpu else 1.0,
    )


def layers_of(model: ModelCost, division: Division, cache: str, speeds: Speeds) -> list[Layer]:
    """Return the operations of all layers with a divided cache."""
    resident = Placement(resident_layers=division.resident_layers).resident_ordinals(len(model.shapes))
    assert speeds.device is not None
    on_device = division.resident_bytes / speeds.device.weight_bytes_per_second
    divided = layer_of(model, division, cache, speeds)
    there = replace(divided, on_device=on_device, on_cpu=0.0, transfer=0.0)
    return [there if index in resident else divided for index in range(len(model.shapes))]


def seconds_of(model: ModelCost, division: Division, cache: str, speeds: Speeds) -> float:
    """Return the seconds of a step."""
    return simulated_seconds(layers_of(model, division, cache, speeds))


def fixed_policies(model: ModelCost, name: str, context: int, machine: PublishedMachine) -> dict[str, list[Layer]]:
    """Return the layers with caches that have the same division on all machines, except for what fits the GPU."""
    streamed, attended = Candidate(name, Strategy.BOTH), Candidate(name, Strategy.BOTH, cpu_fraction=1.0)
    policies = {
        "all streamed": streamed,
        "the CPU attends to all": attended,
        "both ends on the GPU, the middle streamed": with_most_tokens(model, streamed, context, machine.machine),
        "both ends on the GPU, the CPU attends to the middle": with_most_tokens(
            model, attended, context, machine.machine
        ),
        "whole layers on the GPU, the others streamed": with_most_layers(model, streamed, context, machine.machine),
    }
    return {
        policy: layers_of(model, candidate.division(model, context), name, machine.machine.speeds)
        for policy, candidate in policies.items()
        if candidate is not None
    }


def best_share(model: ModelCost, division: Division, cache: str, speeds: Speeds) -> float:
    """Return the seconds of a step with the best of 65 fractions of the CPU."""
    shares = [replace(division, cpu_fraction=number / 64) for number in range(65)]
    return min(seconds_of(model, each, cache, speeds) for each in shares)


def moved(model: ModelCost, division: Division, cache: str, context: int, speeds: Speeds) -> tuple[float, CacheStats]:
    """Return the seconds of a step after the CPU fraction has adapted, and the statistics of its moves."""
    stats = CacheStats()
    share = CpuFraction(division.cpu_fraction, True, stats)

    @functools.cache
    def layers_with(cpu_fraction: float) -> list[Layer]:
        return layers_of(model, replace(division, cpu_fraction=cpu_fraction), cache, speeds)

    steps = simulated_steps(
        lambda index: layers_with(share.fraction)[index],
        len(model.shapes),
        note=lambda cpu_was_last: share.note(cpu_was_last, context),
    )
    return median([next(steps) for _ in range(STEPS_OF_MOVES)][-STEPS:]), stats


def measure(machine: PublishedMachine, name: str, context: int, batch: int, cache: str) -> dict[str, Any]:
    """Return the seconds of a step by policy, the planner's prediction, and the fraction that is reached."""
    model = model_cost(load_config(name), batch=batch)
    (ours,) = [each for each in divided_candidates(model, context, machine.machine) if each.cache == cache]
    speeds = machine.machine.speeds
    policies = fixed_policies(model, cache, context, machine)
    seconds = {policy: simulated_seconds(layers) for policy, layers in policies.items()}
    best = min(seconds, key=seconds.__getitem__)
    division = ours.division(model, context)
    seconds[OURS] = seconds_of(model, division, cache, speeds)
    predicted = make_plan(model, ours, context, machine.machine).seconds_per_token
    assert predicted is not None
    surprises = {}
    for surprise, (bus, cpu) in SURPRISES.items():
        actual = machine.times(bus, cpu).machine.speeds
        fastest = best_share(model, division, cache, actual)
        # Without a part for the CPU nothing is seen.
        for start, at_first in (("planned", division.cpu_fraction or LEAST_CPU_FRACTION), ("half", 0.5)):
            begun = replace(division, cpu_fraction=at_first)
            after, stats = moved(model, begun, cache, context, actual)
            surprises[f"{surprise}, from the {start} share"] = {
                "fixed_seconds": seconds_of(model, begun, cache, actual),
                "moved_seconds": after,
                "best_share_seconds": fastest,
                "shares": [at_first, *(decision.value for decision in stats.decisions)],
            }
    return {
        "machine": machine.name,
        "model": name,
        "context_tokens": context,
        "batch": batch,
        "cache": cache,
        "device_tokens": ours.device_tokens,
        "resident_layers": ours.resident_layers,
        "cpu_share": ours.cpu_fraction,
        "simulated_seconds": seconds,
        "predicted_seconds": predicted,
        "predicted_of_simulated": predicted / seconds[OURS],
        "best_fixed": best,
        "times_as_fast_as_the_best_fixed": seconds[best] / seconds[OURS],
        "moved": surprises,
        "source": machine.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/simulated_step)")
    arguments = parser.parse_args()
    cells = []
    for machine in MACHINES:
        for name, context, batch, cache in CASES[machine.name]:
            cell = measure(machine, name, context, batch, cache)
            cells.append(cell)
            print(f"{machine.name}: {name}, {context:,} tokens, {batch} at once, {cache}")
            for policy, seconds in cell["simulated_seconds"].items():
                print(f"  {seconds * 1e3:>8.1f} ms  {policy}")
            print(
                f"  {cell['device_tokens']:,} tokens of each layer, and {cell['resident_layers']} layers, on the GPU; "
                f"the CPU attends to {cell['cpu_share']:.0%} of the "
                f"others; predicted {cell['predicted_of_simulated']:.2f} of the simulated time; "
                f"{cell['times_as_fast_as_the_best_fixed']:.2f} times as fast as the best fixed policy"
            )
            for surprise, found in cell["moved"].items():
                shares = " ".join(f"{share:.2f}" for share in found["shares"])
                print(
                    f"  {surprise}: {found['fixed_seconds'] * 1e3:.1f} ms, moved {found['moved_seconds'] * 1e3:.1f}, "
                    f"best {found['best_share_seconds'] * 1e3:.1f}; {shares}"
                )
    print(f"record: {records.save('simulated_step', {'cells': cells}, arguments.out)}")
    answers = {
        f"{cell['machine']}, {cell['model']}, {cell['context_tokens']}, {cell['batch']}, {cell['cache']}": cell[
            "times_as_fast_as_the_best_fixed"
        ]
        for cell in cells
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
