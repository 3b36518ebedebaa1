"""`hf-hybrid-cache chat`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from .choices import CACHES, NAMED_MODELS, NEW_TOKENS
from .options import (
    Bits,
    CpuNode,
    Device,
    DType,
    ExpertBits,
    Experts,
    Model,
    PrefillChunkSize,
    Temperature,
    Weights,
    run_on_node,
)


def chat(
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Text, PDF, docx or HTML to talk about, or a folder of them; may be repeated. What does not fit is "
            "cut off and said. Default: Python's language reference.",
        ),
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(help="Go on with a document, or a conversation, that was kept in this file.")
    ] = None,
    model: Model = NAMED_MODELS[0],
    cache: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(CACHES[1:])}. Default: dynamic, or as it was saved.")
    ] = None,
    bits: Bits = None,
    weights: Weights = None,
    experts: Experts = None,
    expert_bits: ExpertBits = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = NEW_TOKENS,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the document to keep at most. Default: what leaves room to talk."),
    ] = None,
    prefill_chunk_size: PrefillChunkSize = 2048,
    temperature: Temperature = 0.0,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep what is typed, for the arrow keys, in a file.")
    ] = False,
    dtype: DType = None,
    device: Device = None,
    cpu_node: CpuNode = None,
) -> None:
    """
    Talk about a document, which is read once.

    The cache is kept between questions, so an answer begins at once. Questions come from standard input, a line each,
    or several between triple quotes; answers go to stdout, remarks to stderr. /help lists what else can be typed,
    Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    options = dict(locals())
    run_on_node(options.pop("cpu_node"))
    options["document"] = tuple(options["document"] or ())
    from .talk import talk

    talk(**options)
