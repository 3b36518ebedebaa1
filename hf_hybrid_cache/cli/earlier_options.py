"""Options of commands that are not yet on `options`; it goes with the last of them."""

import re
from pathlib import Path
from typing import Annotated

import typer

from .choices import DTYPES, NAMED_MODELS
from .distributed.nodes import NodeError, bind_to_node, spread_over_nodes
from .distributed.ranks import local_rank

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
        help="Bits of each key and value, 8, 4 or 2; means --cache quantized, whose default is 4.",
        rich_help_panel=CACHE,
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
        help="host: keep the experts of a mixture-of-experts model in host memory. Default: where the model is.",
        rich_help_panel=MODEL,
    ),
]
ExpertBits = Annotated[
    int | None,
    typer.Option(
        help="Bits of each weight of the experts, 8 or 4; needs --experts host. Default: as they are.",
        rich_help_panel=MODEL,
    ),
]
PrefillChunkSize = Annotated[
    int, typer.Option(min=1, help="Tokens of the prompt per forward pass.", rich_help_panel=MACHINE)
]
Keep = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keep what is read in this folder, and take from it what was read before; it is made if there is none. "
        "Forward passes of a prompt have their default size then.",
        rich_help_panel=DOCUMENT,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0.0, help="Temperature of sampling; 0 takes the likeliest token each time.", rich_help_panel=ANSWER
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that have this probability together. Default: 1.", rich_help_panel=ANSWER
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens that have occurred become less likely. Default: none.", rich_help_panel=ANSWER),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**64 - 1,
        help="Seed of sampling: the same one gives the same answer. Default: none.",
        rich_help_panel=ANSWER,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        help="System message, before the document. Default: that of the chat template.", rich_help_panel=ANSWER
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(DTYPES)}. Default: the checkpoint's.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ... Default: the accelerator, if there is one.", rich_help_panel=MACHINE),
]
CpuNode = Annotated[
    str | None,
    typer.Option(
        "--cpu-node",
        metavar="N|all",
        help="NUMA node, mostly a socket, whose processors run the process and whose memory it takes first. With "
        "torchrun it is the node of the first process; each other process takes the next node. all: all processors, "
        "with memory of all nodes in turn.",
        rich_help_panel=MACHINE,
    ),
]


def run_on_node(choice: str | None) -> None:
    """
    Bind the process to the NUMA node that `--cpu-node` names; call it before torch is imported and counts processors.

    Of the processes that `torchrun` starts on a machine, the first one takes that node, and the others the next nodes.

    Raises:
        typer.Exit: there is no such node; the exit code is 2.
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
    """Print an error, and return the exception to raise where `exit_codes` would import for seconds."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(2)
