"""`hf-hybrid-cache plan`: its options."""

import json
from typing import Annotated

import typer

from ...models.shapes import ALIASES, SHAPES
from ...prefill_chunks import PREFILL_CHUNK_SIZE
from ..earlier_options import CpuNode, DType, refusal, run_on_node


def _print_models(context: typer.Context, wanted: bool) -> None:
    if wanted:
        names = [*ALIASES, *SHAPES]
        typer.echo(json.dumps(names) if context.params.get("as_json") else "\n".join(names))
        raise typer.Exit


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A model of the Hugging Face Hub, or a folder. Built in are Llama 3.1 to 3.3, Qwen 2.5 and 3, "
            "Mistral 7B, Gemma 2 and 3, Phi 3 to 4 mini, SmolLM2, and of mixtures of experts OLMoE, Qwen3-30B-A3B, "
            "gpt-oss-20b, Mixtral 8x7B and DeepSeek-V3: see --list-models."
        ),
    ],
    context: Annotated[
        str | None, typer.Option(help="Tokens, prompt and answer, such as 100000 or 128K. Default: the model's.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="GPU memory, such as 8GiB; 0 is no GPU. Default: what is free here.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, such as 32GiB. Default: what is free here.")
    ] = None,
    dtype: DType = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    continuations: Annotated[
        int,
        typer.Option(
            min=1,
            help="Sequences that continue one prompt. Of the context, the last 512 tokens are the sequence's own; the "
            "tokens before them are held once where the CPU attends, and elsewhere copied for each sequence.",
        ),
    ] = 1,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Tokens of the prompt per forward pass. Default: 512 with a GPU, else {PREFILL_CHUNK_SIZE}."
        ),
    ] = None,
    calibrate_first: Annotated[
        bool, typer.Option("--calibrate", help="Measure the speeds of this machine and keep them.")
    ] = False,
    cpu_node: CpuNode = None,
    host_bandwidth: Annotated[
        str | None, typer.Option(help="Read bandwidth of host memory, such as 30GB/s, instead of the measured one.")
    ] = None,
    gpu_bandwidth: Annotated[
        str | None, typer.Option(help="Read bandwidth of GPU memory, such as 300GB/s, instead of the measured one.")
    ] = None,
    bus_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth from host memory to the GPU, such as 25GB/s, instead of the measured one."),
    ] = None,
    list_models: Annotated[
        bool,
        typer.Option("--list-models", callback=_print_models, help="Print the built-in models and exit."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", is_eager=True, help="Print the plans, or with --list-models the names, as JSON.")
    ] = False,
) -> None:
    """
    Tell which caches fit a machine, how fast they are and how far they go.

    Nothing is loaded. GPUs are taken to be CUDA devices. The plans go to stdout, remarks to stderr.
    """
    if cpu_node is not None and not calibrate_first:
        raise refusal("--cpu-node says where --calibrate measures: pass both, or drop it.")
    run_on_node(cpu_node)
    from ..distributed.group import consoles
    from ..earlier_console import dtype_of, exit_codes
    from .plan_options import PlanOptions, parsed_bandwidth, parsed_memory, parsed_tokens
    from .plan_report import report

    out, notes = consoles()
    with exit_codes(notes):
        options = PlanOptions(
            model=model,
            context=parsed_tokens("--context", context),
            gpu_memory=parsed_memory("--gpu-memory", gpu_memory),
            host_memory=parsed_memory("--host-memory", host_memory),
            dtype=dtype_of(dtype),
            batch_size=batch_size,
            continuations=continuations,
            prefill_chunk_size=prefill_chunk_size,
            calibrate=calibrate_first,
            host_bandwidth=parsed_bandwidth("--host-bandwidth", host_bandwidth),
            gpu_bandwidth=parsed_bandwidth("--gpu-bandwidth", gpu_bandwidth),
            bus_bandwidth=parsed_bandwidth("--bus-bandwidth", bus_bandwidth),
            as_json=as_json,
        )
        report(options, out, notes)
