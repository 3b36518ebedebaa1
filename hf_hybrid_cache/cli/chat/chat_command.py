"""`hf-hybrid-cache chat`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from ...prefill_chunks import PREFILL_CHUNK_SIZE
from ..choices import CACHES, NAMED_MODELS, NEW_TOKENS
from ..options import (
    Bits,
    CpuNode,
    Device,
    DType,
    ExpertBits,
    Experts,
    Keep,
    Model,
    PrefillChunkSize,
    Temperature,
    Weights,
    run_on_node,
)


def chat(
    conversation: Annotated[
        str | None,
        typer.Argument(
            metavar="NUMBER|ID",
            help="The conversation to --resume, as the command kept lists it. Default: what is chosen at a terminal, "
            "elsewhere the one used last.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Text, PDF, docx or HTML to talk about, or a folder of them; may be repeated. What does not fit is "
            "cut off and said. Default: Python's language reference.",
        ),
    ] = None,
    keep: Keep = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a conversation that --keep has kept, where it ended.")
    ] = False,
    load_cache: Annotated[
        Path | None, typer.Option(help="Go on with the document, or the conversation, whose cache is in this file.")
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
    prefill_chunk_size: PrefillChunkSize = PREFILL_CHUNK_SIZE,
    temperature: Temperature = 0.0,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep typed lines, which the arrow keys bring back, in a file.")
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
    run_on_node(cpu_node)
    from ..console import exit_codes, require_one_process
    from ..distributed.group import consoles
    from ..model_options import ModelOptions
    from ..runs.answer_options import AnswerOptions
    from ..runs.sampling import Sampling
    from .chat_options import ChatOptions
    from .talk import talk

    out, notes = consoles()
    with exit_codes(notes):
        require_one_process("chat")
        options = ChatOptions(
            documents=tuple(document or ()),
            load_cache=load_cache,
            keep=keep,
            resumes=resume,
            which=conversation,
            model=ModelOptions(model, weights, experts, expert_bits, dtype, device),
            cache=cache,
            bits=bits,
            answer=AnswerOptions(max_new_tokens, Sampling(temperature), prefill_chunk_size),
            context=context,
            keeps_history=not no_history,
        )
        talk(options, out, notes)
