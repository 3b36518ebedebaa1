"""
Where tokens should be on machines that are not at hand: decode steps simulated on GPU, bus and CPU.

Layers come one after the other. Each has its weights read by the GPU and attends to its tokens on the GPU, to those in
host memory on the CPU at the same time, or to all on the GPU once those have crossed the bus; layers are fetched ahead
into slots that take turns, as the cache does. Bandwidths are published ones, of which a share is reached, and nothing
else is known of these machines: what is simulated was not measured. The division that the planner chooses is compared
with fixed ones, and its prediction with the simulation.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import records
from experiments.published_machines import MACHINES, PublishedMachine
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Candidate, ModelCost, Speeds, Way, divided_candidates, make_plan, model_cost

STEPS = 12
PREFETCH = 1
# A model, its context and sequences at once, that a machine has no room for on its GPU.
CASES: dict[str, list[tuple[str, int, int]]] = {
    MACHINES[0].name: [("meta-llama/Llama-3.2-3B", 65_536, 1), ("meta-llama/Llama-3.2-3B", 131_072, 1)],
    MACHINES[1].name: [("meta-llama/Llama-3.1-8B", 65_536, 1), ("meta-llama/Llama-3.1-8B", 131_072, 1)],
    MACHINES[2].name: [("meta-llama/Llama-3.1-8B", 131_072, 6), ("Qwen/Qwen3-32B", 40_960, 4)],
}
OURS = "divided by the planner"


@dataclass(frozen=True)
class Layer:
    """
    Seconds of what one layer does in a step.

    Attributes:
        launch: until its operations are issued.
        weights: read by the GPU.
        on_device: attention there, to all that is there then.
        on_cpu: attention on the CPU, and the way there and back; 0 for none.
        transfer: over the bus; 0 for none.
    """

    launch: float
    weights: float
    on_device: float
    on_cpu: float = 0.0
    transfer: float = 0.0


def simulated_seconds(layers: Sequence[Layer], prefetch: int = PREFETCH) -> float:
    """Of a step, after enough of them that each is as the one before."""
    issued = device = bus = ended = before = 0.0
    streamed = [index for index, layer in enumerate(layers) if layer.transfer]
    if len(streamed) <= prefetch + 1:  # they stay in the slots
        streamed = []
    arrives: dict[int, float] = {}

    def fetch(index: int) -> None:
        nonlocal bus
        if index not in arrives:
            bus = max(bus, device) + layers[index].transfer
            arrives[index] = bus

    for _ in range(STEPS):
        for index, layer in enumerate(layers):
            issued += layer.launch
            device = max(device, issued) + layer.weights
            if index in streamed:
                fetch(index)
                position = streamed.index(index)
                following = (streamed[position + 1 :] + streamed[:position])[:prefetch]
                for other in following:
                    fetch(other)
                device = max(device, arrives.pop(index))
            joined = device + layer.on_cpu
            device = max(device + layer.on_device, joined)
            if layer.on_cpu:
                issued = max(issued, joined)  # the thread waits for the CPU's part
        before, ended = ended, device
    return ended - before


def layers_of(model: ModelCost, candidate: Candidate, context: int, speeds: Speeds) -> list[Layer]:
    """What the layers of a model do with a cache, each token and weight read once."""
    assert speeds.device is not None
    assert speeds.host is not None
    assert speeds.bus_bytes_per_second is not None
    device, host = speeds.device.weight_bytes_per_second, speeds.host.weight_bytes_per_second
    whole = candidate.division(model, context)
    weights = model.step_weight_bytes / device / model.num_layers
    launch = speeds.device.layer_seconds
    found = []
    for index in sorted(model.shapes):
        if index in candidate.cpu_layers:
            attended = whole.host_bytes / host + speeds.round_trip_seconds
            found.append(Layer(launch, weights, whole.device_bytes / device, on_cpu=attended))
        else:
            on_device = (whole.device_bytes + whole.middle_bytes) / device
            found.append(Layer(launch, weights, on_device, transfer=whole.host_bytes / speeds.bus_bytes_per_second))
    return found


def fixed_policies(model: ModelCost, context: int, machine: PublishedMachine) -> dict[str, list[Layer]]:
    """Layers with caches that do not ask which machine it is, but for how much fits the GPU."""
    speeds, budget = machine.machine.speeds, machine.machine.device_bytes
    everything = tuple(sorted(model.shapes))
    nothing_on_gpu = {
        "all streamed": Candidate("offloaded", Way.BOTH),
        "the CPU attends to all": Candidate("offloaded", Way.BOTH, cpu_layers=everything),
    }
    found = {name: layers_of(model, each, context, speeds) for name, each in nothing_on_gpu.items()}
    streamed = Candidate("offloaded", Way.STREAMED)
    taken = streamed.most(model, streamed.cost(model, context), context).device
    all_streamed = found["all streamed"]
    layer_bytes = nothing_on_gpu["all streamed"].division(model, context).host_bytes
    resident = min(len(everything), int((budget - taken) // layer_bytes))
    on_gpu = {everything[index * len(everything) // resident] for index in range(resident)}
    found["whole layers on the GPU, the others streamed"] = [
        Layer(each.launch, each.weights, each.on_device) if index in on_gpu else each
        for index, each in zip(everything, all_streamed, strict=True)
    ]
    return found


def measure(machine: PublishedMachine, name: str, context: int, batch: int) -> dict[str, Any]:
    """Seconds of a step by policy, and what the planner predicts of its own."""
    model = model_cost(load_config(name), batch=batch)
    (ours,) = [each for each in divided_candidates(model, context, machine.machine) if each.cache == "offloaded"]
    speeds = machine.machine.speeds
    policies = fixed_policies(model, context, machine)
    both = Candidate(ours.cache, Way.BOTH, None, ours.device_tokens)
    everything = tuple(sorted(model.shapes))
    policies |= {
        "both ends on the GPU, the middle streamed": layers_of(model, both, context, speeds),
        "both ends on the GPU, the CPU attends to the middle": layers_of(
            model, Candidate(ours.cache, Way.BOTH, None, ours.device_tokens, everything), context, speeds
        ),
    }
    seconds = {policy: simulated_seconds(layers) for policy, layers in policies.items()}
    best = min(seconds, key=seconds.__getitem__)
    seconds[OURS] = simulated_seconds(layers_of(model, ours, context, speeds))
    predicted = make_plan(model, ours, context, machine.machine).seconds_per_token
    assert predicted is not None
    return {
        "machine": machine.name,
        "model": name,
        "context_tokens": context,
        "batch": batch,
        "device_tokens": ours.device_tokens,
        "layers": len(everything),
        "cpu_layers": len(ours.cpu_layers),
        "simulated_seconds": seconds,
        "predicted_seconds": predicted,
        "predicted_of_simulated": predicted / seconds[OURS],
        "best_fixed": best,
        "times_as_fast_as_the_best_fixed": seconds[best] / seconds[OURS],
        "source": machine.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record (default: in results/simulated_step)")
    arguments = parser.parse_args()
    cells = []
    for machine in MACHINES:
        for name, context, batch in CASES[machine.name]:
            cell = measure(machine, name, context, batch)
            cells.append(cell)
            print(f"{machine.name}: {name}, {context:,} tokens, {batch} at once")
            for policy, seconds in cell["simulated_seconds"].items():
                print(f"  {seconds * 1e3:>8.1f} ms  {policy}")
            print(
                f"  {cell['device_tokens']:,} tokens on the GPU, the CPU attends in {cell['cpu_layers']} of "
                f"{cell['layers']} layers; predicted {cell['predicted_of_simulated']:.2f} of the simulated time; "
                f"{cell['times_as_fast_as_the_best_fixed']:.2f} times as fast as the best fixed policy"
            )
    print(f"record: {records.save('simulated_step', {'cells': cells}, arguments.out)}")
    print(
        json.dumps(
            {f"{cell['machine']}, {cell['context_tokens']}": cell["times_as_fast_as_the_best_fixed"] for cell in cells}
        )
    )


if __name__ == "__main__":
    main()
