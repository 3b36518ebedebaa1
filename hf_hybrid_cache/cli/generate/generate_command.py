"""`hf-hybrid-cache generate`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from ...prefill_chunks import PREFILL_CHUNK_SIZE
from ..choices import CACHES, COMPARED_TOKENS, DEFAULT_QUESTION, NAMED_MODELS, NEW_TOKENS, RANDOM_TOKENS
from ..options import (
    ANSWER,
    CACHE,
    DOCUMENT,
    Bits,
    CpuNode,
    Device,
    DType,
    ExpertBits,
    Experts,
    Keep,
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
            help=f"Question about the document; without one, --keep and --save-cache only keep "
            f"the document. Default, without --document: {DEFAULT_QUESTION}",
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
    keep: Keep = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep the cache of the document in this file, for other questions.", rich_help_panel=DOCUMENT
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save-cache replace a file that holds no cache.")
    ] = False,
    load_cache: Annotated[
        Path | None,
        typer.Option(
            help="Ask about the document whose cache is in this file; --document is not needed.",
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
    prefill_chunk_size: PrefillChunkSize = PREFILL_CHUNK_SIZE,
    prefetch_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="offloaded: layers that are fetched to the device ahead of use. Default: 1.",
            rich_help_panel=CACHE,
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
            help="offloaded: first and recent tokens of each layer that stay on the device, at most. Default: 0.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    cpu_decode: Annotated[
        str | None,
        typer.Option(
            metavar="yes|no|auto|FRACTION",
            help="Attend on the CPU to the tokens in host memory: to all, to none, or to a fraction such as 0.6, while "
            "the others are streamed; auto finds the fraction. Default: yes for a model on the CPU.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    bits: Bits = None,
    page_top_p: Annotated[
        float | None,
        typer.Option(
            help="Attend only to the pages that carry this fraction of the attention, such as 0.995. Default: to all.",
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
            help="Print the answer, or all answers of --compare, and what they took as a line of JSON.",
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
    run_on_node(cpu_node)
    from ..console import exit_codes
    from ..distributed.group import consoles
    from ..model_options import ModelOptions
    from ..runs.answer_options import AnswerOptions
    from ..runs.sampling import Sampling
    from .answer import answer
    from .cache_choice import CacheChoice
    from .cache_files import CacheFiles
    from .generate_options import GenerateOptions
    from .prompt_options import PromptOptions

    out, notes = consoles(quiet)
    with exit_codes(notes):
        options = GenerateOptions(
            files=CacheFiles(save_cache, load_cache, keep, force),
            model=ModelOptions(model, weights, experts, expert_bits, dtype, device),
            answer=AnswerOptions(
                max_new_tokens or (COMPARED_TOKENS if compare else NEW_TOKENS),
                Sampling(temperature, top_p, repetition_penalty, seed),
                prefill_chunk_size,
            ),
            cache=CacheChoice(
                cache, compare, bits, prefetch_layers, resident_layers, device_tokens, cpu_decode, page_top_p
            ),
            prompt=PromptOptions(tuple(document or ()), question, prompt_file, context, system),
            as_json=as_json,
        )
        answer(options, out, notes)
