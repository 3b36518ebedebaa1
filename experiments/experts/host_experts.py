"""
Plans for mixture-of-experts models on other machines, with experts in host memory and all else on the GPU.

Two questions, worked out by the planner. What fits: for each card and each amount of host memory the experts with the
most bits that there is room for, and the context that then fits the GPU. And how fast at most: of a token, the bytes of
the experts that it chooses, and how long they and all else take to be read at a share of published bandwidths.
Nothing of this was measured.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.common import records
from experiments.common.options import plain_parser
from hf_hybrid_cache.models import load_config
from hf_hybrid_cache.planning import Machine, Speeds, model_cost
from hf_hybrid_cache.planning.candidates import Candidate, Strategy
from hf_hybrid_cache.planning.model_cost import ModelCost
from hf_hybrid_cache.planning.plans import make_plan
from hf_hybrid_cache.weights import WEIGHT_BITS

MODELS = (
    "allenai/OLMoE-1B-7B-0924",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V3",
)
HOST_GIB = (32, 64, 128, 256, 512)
CACHE = "dynamic"
# Tokens of context in the second question, or as many as the model has.
CONTEXT = 8192
# The share of a peak that the measured processors reach (docs/log.md), assumed for the others too.
REACHED = 0.8
GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class PublishedMachine:
    """
    A GPU in a host.

    Attributes:
        name: of both.
        gpu_gib: its memory.
        host_gib: assumed.
        gpu_gbs: peak of its memory, GB/s.
        bus_gbs: peak of the bus in one direction.
        host_gbs: peak of the host's memory.
        source: of the peaks.
    """

    name: str
    gpu_gib: int
    host_gib: int
    gpu_gbs: float
    bus_gbs: float
    host_gbs: float
    source: str

    @property
    def machine(self) -> Machine:
        """Return the machine in the planner's form."""
        host, device, bus = (REACHED * each * GB for each in (self.host_gbs, self.gpu_gbs, self.bus_gbs))
        speeds = Speeds(host_bandwidth=host, gpu_bandwidth=device, bus_bandwidth=bus)
        return Machine(self.gpu_gib * GIB, self.host_gib * GIB, speeds)


# A transfer of DDR is 8 bytes a channel; a lane of PCIe 4.0 carries 16 Gbit/s, of which 128 bits of 130.
_PCIE_4 = 16 * 16 / 8 * 128 / 130
# The amount of host memory is varied.
CARDS = (
    PublishedMachine(
        *("RTX 4060, 2 channels of DDR5-5600", 8, 64, 272, _PCIE_4 / 2, 2 * 5.6 * 8),
        "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4060-4060ti: 128 bits of GDDR6, 17 Gbit/s, 8 lanes of "
        "PCIe 4.0; JESD79-5",
    ),
    PublishedMachine(
        *("RTX 4090, 8 channels of DDR5-4800", 24, 512, 1008, _PCIE_4, 8 * 4.8 * 8),
        "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090: 384 bits of GDDR6X, 21 Gbit/s; JESD79-5; a socket "
        "of what github.com/kvcache-ai/ktransformers was measured on",
    ),
)


def longest_context(model: ModelCost, candidate: Candidate, machine: Machine) -> int:
    """Tokens that fit once the model is where it computes, whatever it took to load it; 0 for none."""

    def does_not_fit(context: int) -> bool:
        held = candidate.running(model, candidate.cost(model, context), context)
        return held.device > machine.device_bytes or held.host > machine.host_bytes

    return bisect_left(range(1, model.max_context + 1), True, key=does_not_fit)


def fitting(model: ModelCost, machine: Machine) -> dict[str, Any]:
    """
    The candidate with the most bits that fits and can be loaded, experts in host memory first; where none can be loaded
    the first that fits then, and where none fits, `bits` is 0.
    """
    first: dict[str, Any] = {"bits": 0, "on_gpu": False, "longest_context": 0, "can_be_loaded": False}
    for on_gpu in (True, False):
        for bits in (None, *WEIGHT_BITS):
            candidate = Candidate(CACHE, Strategy.GPU if on_gpu else Strategy.CPU, bits, experts_on_host=on_gpu)
            if context := longest_context(model, candidate, machine):
                fit = {"bits": bits or 8 * model.dtype.itemsize, "on_gpu": on_gpu, "longest_context": context}
                if candidate.loading_bytes(model) <= machine.host_bytes:
                    return {**fit, "can_be_loaded": True}
                first = first if first["bits"] else {**fit, "can_be_loaded": False}
    return first


def speeds(model: ModelCost, card: PublishedMachine, bits: int | None) -> dict[str, Any]:
    """Tokens a second at most, by experts alone and by all that is read; `None` for attention of an unknown kind."""
    context = min(CONTEXT, model.max_context)
    plan = make_plan(model, Candidate(CACHE, Strategy.GPU, bits, experts_on_host=True), context, card.machine)
    num_bytes = model.experts.read_bytes(1, bits)
    return {
        "bits": bits or 8 * model.dtype.itemsize,
        "context_tokens": context,
        "expert_bytes": num_bytes,
        "experts_tokens_per_second": REACHED * card.host_gbs * GB / num_bytes,
        "tokens_per_second": None if plan.seconds_per_token is None else 1 / plan.seconds_per_token,
    }


def measure(name: str, card: PublishedMachine) -> dict[str, Any]:
    """Both answers for one model and one card."""
    model = model_cost(load_config(name))
    machines = {host_gib: replace(card, host_gib=host_gib).machine for host_gib in HOST_GIB}
    return {
        "model": name,
        "card": card.name,
        "weight_bytes": model.weight_bytes,
        "expert_bytes": model.experts.total_bytes(),
        "other_bytes": model.without_experts().weight_bytes,
        "fits": {str(host_gib): fitting(model, machine) for host_gib, machine in machines.items()},
        "speeds": [speeds(model, card, bits) for bits in (None, *WEIGHT_BITS)],
        "source": card.source,
    }


def fit_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: what fits."""
    heads = ["card", "model", *(f"{host_gib} GiB" for host_gib in HOST_GIB)]
    rows = [[_gpu(cell), _short(cell), *map(_fit, cell["fits"].values())] for cell in cells]
    return _markdown(heads, rows)


def speed_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: how fast at most, with experts in 16 and 4 bits where there is host memory for them."""
    heads = "machine", "model", "bits of an expert's weight", "GiB of experts a token", "they alone", "all that is read"
    rows = []
    for cell in cells:
        most_bits = max(fit["bits"] for fit in cell["fits"].values())
        for row in cell["speeds"]:
            if row["bits"] != 8 and row["bits"] <= most_bits:
                rates = (_rate(row[key]) for key in ("experts_tokens_per_second", "tokens_per_second"))
                gib = f"{row['expert_bytes'] / GIB:.2f}"
                rows.append([cell["card"], _short(cell), str(row["bits"]), gib, *rates])
    return _markdown(heads, rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _gpu(cell: dict[str, Any]) -> str:
    return next(f"{card.gpu_gib} GB" for card in CARDS if card.name == cell["card"])


def _short(cell: dict[str, Any]) -> str:
    return str(cell["model"].partition("/")[2])


def _fit(fit: dict[str, Any]) -> str:
    if not fit["bits"]:
        return "-"
    where = "" if fit["on_gpu"] else "CPU alone, "
    return f"{where}{fit['bits']} bits: {fit['longest_context']:,}" + ("" if fit["can_be_loaded"] else " *")


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f}"


def main() -> None:
    parser = plain_parser("host_experts", __doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="as `plan` knows them (default: %(default)s)")
    arguments = parser.parse_args()
    cells = [measure(name, card) for card in CARDS for name in arguments.models]
    print("\n".join([*fit_table(cells), "", *speed_table(cells)]))
    print(f"record: {records.save('host_experts', {'cells': cells}, arguments.out)}")
    fits = {f"{_gpu(cell)}, {cell['model']}": [fit["bits"] for fit in cell["fits"].values()] for cell in cells}
    print(json.dumps(fits))


if __name__ == "__main__":
    main()
