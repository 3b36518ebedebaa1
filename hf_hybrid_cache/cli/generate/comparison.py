"""Times and memory of runs as text: a line for one run, a table for all caches."""

from rich import box
from rich.table import Table
from transformers import PreTrainedModel

from ..runs.timed_run import Run

# The row of a comparison in which the quantized cache and quantized weights go together.
FEW_WEIGHT_BITS = 4
WITH_WEIGHTS = f"{FEW_WEIGHT_BITS}-bit weights\nand quantized"


def summary(name: str, run: Run, weights: str | None) -> str:
    """Describe a run in one line; `weights` ends it where weights are quantized."""
    read = "" if run.fraction_read is None else f", of which attention read {run.fraction_read:.1%}"
    return (
        f"{name}: prefill {run.prefill_seconds:.2f} s, decode {_rate(run)} tokens/s, "
        f"KV {mebibytes(run.device_bytes)} on the device, {mebibytes(run.host_bytes)} on the host{read}"
    ) + ("" if weights is None else f"; {weights}")


def table(runs: dict[str, Run]) -> Table:
    """Make a table with a row for each run; the run of "stock" comes first."""
    table = Table(box=box.SIMPLE)
    table.add_column("cache")
    for heading in ("prefill\nseconds", "decode\ntokens/s", "KV on\ndevice", "KV on\nhost"):
        table.add_column(heading, justify="right")
    table.add_column("same tokens\nas stock")
    for name, run in runs.items():
        different = run.first_difference(runs["stock"])
        table.add_row(
            name,
            f"{run.prefill_seconds:.2f}",
            _rate(run),
            mebibytes(run.device_bytes),
            mebibytes(run.host_bytes),
            "yes" if different is None else f"no, from {different}",
        )
    return table


def conclusion(runs: dict[str, Run], num_tokens: int, dtype: str) -> str:
    """Sum the table up in two lines, and explain answers that differ because a data type has few digits."""
    stock, ours = runs["stock"], {name: run for name, run in runs.items() if name != "stock"}
    rates = {one_line(name): run.decode_tokens_per_second for name, run in ours.items()}
    percent = 100 * _bytes(runs["quantized"]) / max(1, _bytes(stock))
    text = ""
    if stock.decode_tokens_per_second and all(rates.values()):
        ratios = [f"{name} {(rate or 0.0) / stock.decode_tokens_per_second:.2f}" for name, rate in rates.items()]
        text += f"Tokens a second after {num_tokens:,}, in parts of stock's: {', '.join(ratios)}.\n"
    same = sum(run.first_difference(stock) is None for run in ours.values())
    text += f"Quantized holds {percent:.0f}% of stock's bytes; {same} of {len(ours)} give the same answer.\n"
    if same < len(ours) and dtype != "float32":
        text += f"In {dtype} attention that adds up in another order rounds differently: try --dtype float32.\n"
    return text


def one_line(name: str) -> str:
    """The name of a run on one line."""
    return name.replace("\n", " ")


def dtype_text(model: PreTrainedModel) -> str:
    """The type of a model's weights, without torch's prefix."""
    return str(model.dtype).removeprefix("torch.")


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _bytes(run: Run) -> int:
    return run.device_bytes + run.host_bytes


def _rate(run: Run) -> str:
    return "-" if run.decode_tokens_per_second is None else f"{run.decode_tokens_per_second:.1f}"
