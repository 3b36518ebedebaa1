"""`hf-hybrid-cache generate`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from .choices import CACHES, COMPARED_TOKENS, DEFAULT_QUESTION, NAMED_MODELS, NEW_TOKENS, RANDOM_TOKENS
from .options import (
    ANSWER,
    CACHE,
    DOCUMENT,
    Bits,
    CpuNode,
    Device,
    DType,
    ExpertBits,
    Experts,
    Model,
    PrefillChunkSize,
    RepetitionPenalty,
    Seed,
    System,
    Temperature,
    TopP,
    Weights,
    run_on_node,
)


def generate(
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER|-",
            help="Text, PDF, docx or HTML to ask about, a folder of them, or - for standard input; may be repeated. "
            "What does not fit is cut off and said. Default: Python's language reference.",
            rich_help_panel=DOCUMENT,
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help=f"About the document; without one, --save-cache only saves. Default, without --document: "
            f"{DEFAULT_QUESTION}",
            rich_help_panel=DOCUMENT,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="The whole prompt, used as it is, instead of document and question.", rich_help_panel=DOCUMENT
        ),
    ] = None,
    model: Model = NAMED_MODELS[0],
    cache: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(CACHES)}. Default: dynamic, or as it was saved.", rich_help_panel=CACHE),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Generate with every cache and print a table.", rich_help_panel=CACHE)
    ] = False,
    save_cache: Annotated[
        Path | None,
        typer.Option(help="Keep the document, computed, in this file, for other questions.", rich_help_panel=DOCUMENT),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save-cache replace a file that is no cache's, too.")
    ] = False,
    load_cache: Annotated[
        Path | None,
        typer.Option(
            help="Ask about the document that was kept in this file; --document is not needed.",
            rich_help_panel=DOCUMENT,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens of the answer at most. Default: {NEW_TOKENS}, with --compare {COMPARED_TOKENS}.",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--context-tokens",
            min=1,
            help="Tokens of the document to keep at most. Default: what fits the model; "
            f"{RANDOM_TOKENS:,} random ones for a model without a tokenizer.",
            rich_help_panel=DOCUMENT,
        ),
    ] = None,
    prefill_chunk_size: PrefillChunkSize = 2048,
    prefetch_layers: Annotated[
        int | None,
        typer.Option(
            min=0, help="offloaded: layers on their way to the device ahead of use. Default: 1.", rich_help_panel=CACHE
        ),
    ] = None,
    resident_layers: Annotated[
        int | None,
        typer.Option(min=0, help="offloaded: layers that stay on the device. Default: 0.", rich_help_panel=CACHE),
    ] = None,
    device_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="offloaded: first and last tokens of each layer on the device, at most. Default: 0.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    cpu_decode: Annotated[
        str | None,
        typer.Option(
            metavar="yes|no|auto|SHARE",
            help="Attend on the CPU to what is in host memory: to all, none, a share such as 0.6, while the rest is "
            "streamed, or the share that turns out to be best (offloaded). Default: yes for a model on the CPU.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    bits: Bits = None,
    mass: Annotated[
        float | None,
        typer.Option(
            help="Read only what carries this share of the attention, such as 0.995. Default: all.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    weights: Weights = None,
    experts: Experts = None,
    expert_bits: ExpertBits = None,
    system: System = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the answer, or with --compare all, and what they took, as JSON.",
            rich_help_panel=ANSWER,
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No remarks, and no progress.", rich_help_panel=ANSWER)
    ] = False,
    dtype: DType = None,
    device: Device = None,
    cpu_node: CpuNode = None,
) -> None:
    """
    Answer a question about a document.

    The answer and the table go to stdout, progress and remarks to stderr.
    """
    options = dict(locals())
    run_on_node(options.pop("cpu_node"))
    options["document"] = tuple(options["document"] or ())
    from .answer import answer

    answer(**options)
