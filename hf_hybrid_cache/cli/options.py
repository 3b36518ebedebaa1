"""Options that several subcommands have, and what one of them does before anything heavy is imported."""

import re
from typing import Annotated

import typer

from .choices import DTYPES, NAMED_MODELS
from .nodes import NodeError, bind_to_node, spread_over_nodes
from .ranks import local_rank

Model = Annotated[str, typer.Option(help=f"{', '.join(NAMED_MODELS)}, a model of the Hugging Face Hub, or a folder.")]
Bits = Annotated[
    int | None, typer.Option(help="Bits of each number, 8, 4 or 2; means --cache quantized, whose default is 4.")
]
Weights = Annotated[
    int | None, typer.Option(help="Bits of each weight, 8 or 4, for a model on the CPU. Default: as they are.")
]
Experts = Annotated[
    str | None,
    typer.Option(help="host: experts of a mixture-of-experts model in host memory. Default: where the model is."),
]
ExpertBits = Annotated[
    int | None, typer.Option(help="Bits of each weight of experts in host memory, 8 or 4. Default: as they are.")
]
PrefillChunkSize = Annotated[int, typer.Option(min=1, help="Tokens of the prompt per forward pass.")]
DType = Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}. Default: the model's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... Default: an accelerator if any.")]
CpuNode = Annotated[
    str | None,
    typer.Option(
        "--cpu-node",
        metavar="N|all",
        help="Run on the processors of this NUMA node, mostly a socket, and take memory there first, as numactl does. "
        "With torchrun: the first process, the others on the nodes after it. all: on all processors, with memory of "
        "all nodes in turn.",
    ),
]


def run_on_node(choice: str | None) -> None:
    """
    Do what `--cpu-node` says, before torch is imported: it counts processors then.

    Of processes that `torchrun` has started on a machine, the first one takes that node and the others those after it.
    """
    if choice is None:
        return
    if not re.fullmatch(r"all|\d{1,9}", choice):
        raise refusal(f"--cpu-node must be the number of a node or all, got {choice!r}.")
    try:
        if choice == "all":
            warning = spread_over_nodes()
        else:
            choice = str(int(choice) + local_rank())
            warning = bind_to_node(int(choice))
    except NodeError as error:
        raise refusal(f"--cpu-node {choice}: {error}") from error
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)


def refusal(message: str) -> typer.Exit:
    """To be raised where `exit_codes` would take seconds to import."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(2)
