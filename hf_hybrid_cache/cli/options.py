"""Options that several subcommands have, and what one of them does before anything heavy is imported."""

import re
from typing import Annotated

import typer

from .choices import DTYPES, NAMED_MODELS
from .nodes import NodeError, bind_to_node, spread_over_nodes
from .ranks import local_rank

# The groups of options in a help text.
DOCUMENT, ANSWER, CACHE, MODEL, MACHINE = "Document", "Answer", "Cache", "Model", "Machine"

Model = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(NAMED_MODELS)}, a model of the Hugging Face Hub, or a folder.", rich_help_panel=MODEL
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        help="Bits of each number, 8, 4 or 2; means --cache quantized, whose default is 4.", rich_help_panel=CACHE
    ),
]
Weights = Annotated[
    int | None,
    typer.Option(
        help="Bits of each weight, 8 or 4, for a model on the CPU. Default: as they are.", rich_help_panel=MODEL
    ),
]
Experts = Annotated[
    str | None,
    typer.Option(
        help="host: experts of a mixture-of-experts model in host memory. Default: where the model is.",
        rich_help_panel=MODEL,
    ),
]
ExpertBits = Annotated[
    int | None,
    typer.Option(
        help="Bits of each weight of experts in host memory, 8 or 4. Default: as they are.", rich_help_panel=MODEL
    ),
]
PrefillChunkSize = Annotated[
    int, typer.Option(min=1, help="Tokens of the prompt per forward pass.", rich_help_panel=MACHINE)
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token each time.", rich_help_panel=ANSWER)
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that have this probability together. Default: 1.", rich_help_panel=ANSWER
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 makes tokens less likely that were there before. Default: none.", rich_help_panel=ANSWER
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Of sampling, for the same answer again. Default: none.", rich_help_panel=ANSWER),
]
System = Annotated[
    str | None,
    typer.Option(
        help="Message to the model before the document. Default: that of its template.", rich_help_panel=ANSWER
    ),
]
DType = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(DTYPES)}. Default: the model's.", rich_help_panel=MODEL)
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ... Default: an accelerator if any.", rich_help_panel=MACHINE)
]
CpuNode = Annotated[
    str | None,
    typer.Option(
        "--cpu-node",
        metavar="N|all",
        help="Run on the processors of this NUMA node, mostly a socket, and take memory there first, as numactl does. "
        "With torchrun: the first process, the others on the nodes after it. all: on all processors, with memory of "
        "all nodes in turn.",
        rich_help_panel=MACHINE,
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
