"""`hf-hybrid-cache batch`: its options."""

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
    RepetitionPenalty,
    Seed,
    System,
    Temperature,
    TopP,
    Weights,
    run_on_node,
)


def batch(
    questions: Annotated[
        Path,
        typer.Argument(
            help='Lines such as {"document": "report.txt", "question": "Who wrote it?", "id": 7}; the id may be left '
            "out, and other fields are those of the answer too. A document is a file or a folder, or a list of them; "
            "names are relative to this file's folder."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="File for a line of JSON for each answer, as they come; - for standard output.")
    ],
    keep: Keep = None,
    executor: Annotated[
        str | None,
        typer.Option(help="Distribute the documents to jobs: local, on this machine, or slurm. Default: no jobs."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="How many jobs. Default: 1.")] = None,
    job_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter of submitit, such as timeout_min=60 or slurm_partition=gpu; may be repeated.",
        ),
    ] = None,
    model: Model = NAMED_MODELS[0],
    cache: Annotated[str | None, typer.Option(help=f"One of {', '.join(CACHES[1:])}. Default: dynamic.")] = None,
    bits: Bits = None,
    weights: Weights = None,
    experts: Experts = None,
    expert_bits: ExpertBits = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = NEW_TOKENS,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Read only so many tokens of each document. Default: all; too many are an error."),
    ] = None,
    at_once: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|auto",
            help="Questions about one document that are answered together, at most: a step reads the weights once for "
            "all of them. Each takes memory for its own tokens, and for a copy of the document where it is not shared: "
            "quantized, on a device. auto: 32, or as many as memory has room for. The default is 1, because in 16 "
            "bits, and with sampling, answers depend on those beside them.",
        ),
    ] = "1",
    prefill_chunk_size: PrefillChunkSize = PREFILL_CHUNK_SIZE,
    system: System = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    dtype: DType = None,
    device: Device = None,
    cpu_node: CpuNode = None,
) -> None:
    """
    Answer many questions about many documents.

    A document is computed once for all of its questions. What is answered already is not asked again, wherever its line
    is: the same command goes on after an interruption, and asks what is new. A document that cannot be read is an
    answer with an error; the exit code is 1 then, 0 if all questions are answered.
    """
    run_on_node(cpu_node)
    from ..console import cache_of_ours, exit_codes, require_one_process
    from ..distributed.group import consoles
    from ..model_options import ModelOptions
    from ..runs.answer_options import AnswerOptions
    from ..runs.prompt_store import check_keep
    from ..runs.sampling import Sampling
    from .batch import answer_all
    from .batch_options import BatchFiles, BatchOptions, JobOptions, parsed_at_once

    _, notes = consoles()
    with exit_codes(notes):
        require_one_process("batch")
        if keep is not None:
            check_keep(prefill_chunk_size)
        options = BatchOptions(
            cache=cache_of_ours(cache, bits),
            bits=bits,
            model=ModelOptions(model, weights, experts, expert_bits, dtype, device),
            answer=AnswerOptions(
                max_new_tokens, Sampling(temperature, top_p, repetition_penalty, seed), prefill_chunk_size
            ),
            context=context,
            system=system,
            at_once=parsed_at_once(at_once),
        )
        job_options = JobOptions(executor, jobs, tuple(job_option or ()))
        answer_all(options, BatchFiles(questions, out, keep), job_options, notes)
