"""The part of a plan that describes the experts of a model."""

from typing import Any

from rich import box
from rich.table import Table

from ...planning.model_cost import ModelCost
from ...weights import WEIGHT_BITS

_GIB = 2**30


def experts_heading(cost: ModelCost) -> str:
    """Describe how many experts there are, and how large the other weights are."""
    layers = cost.experts.layers
    counts, chosen = ({getattr(layer, name) for layer in layers} for name in ("count", "chosen"))
    others = cost.without_experts().weight_bytes / _GIB
    return (
        f"{len(layers)} layers of {_range(counts)} experts, {_range(chosen)} for each token; "
        f"other weights take {others:.1f} GiB"
    )


def experts_table(cost: ModelCost) -> Table:
    """Make a table of the bytes of all experts, and of those that are read at once."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("experts read")
    for heading in ("of a\nlayer", "as they are\nGiB", *(f"in {bits} bits\nGiB" for bits in WEIGHT_BITS)):
        table.add_column(heading, justify="right")
    for row in experts_read(cost):
        sizes = [row["bytes"][str(bits)] for bits in (None, *WEIGHT_BITS)]
        table.add_row(row["read"], f"{row['experts']:.1f}", *(f"{size / _GIB:.2f}" for size in sizes))
    return table


def experts_read(cost: ModelCost) -> list[dict[str, Any]]:
    """
    List the experts that are read for one token, for a batch and for a chunk, and all experts.

    Returns:
        For each: its name, the tokens at once (`None` for all experts), the experts of a layer on average, and their
        bytes by the bits of a weight, `"None"` for weights that are not quantized.
    """
    experts, batch = cost.experts, cost.batch
    tokens = {"for one token": 1}
    if batch > 1:
        tokens[f"for {batch} at once"] = batch
    tokens[f"for a chunk of {batch * cost.chunk:,}"] = batch * cost.chunk
    widths = (None, *WEIGHT_BITS)
    rows: list[dict[str, Any]] = [
        {
            "read": name,
            "tokens": count,
            "experts": experts.distinct(count),
            "bytes": {str(bits): experts.read_bytes(count, bits) for bits in widths},
        }
        for name, count in tokens.items()
    ]
    mean = sum(layer.count for layer in experts.layers) / len(experts.layers)
    total = {str(bits): experts.total_bytes(bits) for bits in widths}
    return [*rows, {"read": "all", "tokens": None, "experts": mean, "bytes": total}]


def _range(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
