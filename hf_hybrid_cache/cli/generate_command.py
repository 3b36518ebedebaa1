"""`hf-hybrid-cache generate`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from .choices import CACHES, DEFAULT_QUESTION, NAMED_MODELS, RANDOM_TOKENS
from .options import Bits, CpuNode, Device, DType, ExpertBits, Experts, Model, PrefillChunkSize, Weights, run_on_node


def generate(
    document: Annotated[
        Path | None,
        typer.Option(
            help="Text to ask about, - for standard input; what does not fit is cut off and said. Default: Python's "
            "language reference."
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help=f"About the document; without one, --save-cache only saves. Default, without --document: "
            f"{DEFAULT_QUESTION}"
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The whole prompt, used as it is, instead of document and question.")
    ] = None,
    model: Model = NAMED_MODELS[0],
    cache: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(CACHES)}. Default: offloaded, or as it was saved.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Generate with every cache and print a table.")] = False,
    save_cache: Annotated[
        Path | None, typer.Option(help="Keep the document, computed, in this file, for other questions.")
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(help="Ask about the document that was kept in this file; --document is not needed.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")] = 64,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--context-tokens",
            min=1,
            help="Tokens of the document to keep at most. Default: what fits the model; "
            f"{RANDOM_TOKENS:,} random ones for a model without a tokenizer.",
        ),
    ] = None,
    prefill_chunk_size: PrefillChunkSize = 2048,
    prefetch_layers: Annotated[
        int | None, typer.Option(min=0, help="offloaded: layers on their way to the device ahead of use. Default: 1.")
    ] = None,
    resident_layers: Annotated[
        int | None, typer.Option(min=0, help="offloaded: layers that stay on the device. Default: 0.")
    ] = None,
    device_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="offloaded: first and last tokens of each layer on the device, at most. Default: 0."),
    ] = None,
    cpu_decode: Annotated[
        str | None,
        typer.Option(
            metavar="yes|no|auto|SHARE",
            help="Attend on the CPU to what is in host memory: to all, none, a share such as 0.6, while the rest is "
            "streamed, or the share that turns out to be best (offloaded). Default: yes for a model on the CPU.",
        ),
    ] = None,
    bits: Bits = None,
    mass: Annotated[
        float | None,
        typer.Option(help="Read only what carries this share of the attention, such as 0.995. Default: all."),
    ] = None,
    weights: Weights = None,
    experts: Experts = None,
    expert_bits: ExpertBits = None,
    dtype: DType = None,
    device: Device = None,
    cpu_node: CpuNode = None,
) -> None:
    """
    Answer a question about a document.

    The answer and the table go to stdout, progress and remarks to stderr. Decoding is greedy.
    """
    options = dict(locals())
    run_on_node(options.pop("cpu_node"))
    from .answer import answer

    answer(**options)
