"""`hf-hybrid-cache plan`: which cache suits a model and a machine, before anything is loaded."""

from dataclasses import replace
from typing import Annotated

import typer

from ..models.shapes import SHAPES, SMOLLM2
from ..scalars import PREFILL_CHUNK_SIZE, parse_bytes, parse_tokens
from .console import UsageError, consoles, exit_codes, note
from .options import DType, parsed

# Tokens that a laptop reads in minutes.
DEFAULT_CONTEXT = 8192


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A model of the Hugging Face Hub, or a folder. Built in are Llama 3.1 to 3.3, Qwen 3, "
            "Mistral 7B, Gemma 3, Phi 4 mini, SmolLM2, and of mixtures of experts OLMoE, Qwen3-30B-A3B, gpt-oss-20b "
            "and DeepSeek-V3."
        ),
    ],
    context: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens, prompt and answer, such as 100000 or 128K. Default: {DEFAULT_CONTEXT:,}, or as many as the "
            "model has."
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="GPU memory, such as 8GiB; 0 is no GPU. Default: what is free here.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, such as 32GiB. Default: what is free here.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and states. Default: the checkpoint's.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prefill_chunk_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of the prompt in a forward pass, in Python; fewer take less memory. The command always takes "
            "the default.",
        ),
    ] = PREFILL_CHUNK_SIZE,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure on this machine how long the first token takes, and each further one, with some layers of "
            "the model and random weights: some 20 seconds for each plan that may be recommended.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
) -> None:
    """
    Tell which cache and weights of a model fit a machine.

    Nothing is loaded; --measure tells how fast they are on this machine. The plans go to stdout, remarks to stderr.
    """
    out, notes = consoles()
    with exit_codes(notes):
        tokens = parsed("--context", context, parse_tokens)
        memory = (
            parsed("--gpu-memory", gpu_memory, _parse_memory),
            parsed("--host-memory", host_memory, _parse_memory),
        )
        # Options are checked before torch and transformers are imported.
        import torch

        from ..models import load_config
        from ..planning import make_plans, measured_plans, model_cost, this_machine
        from .plan_report import Report, plan_name

        config, machine = load_config(model), this_machine(*memory)
        cost = model_cost(config, None if dtype is None else getattr(torch, dtype), batch_size, prefill_chunk_size)
        # What is printed runs as it is: with a GGUF file, and with the name that was asked for where it is known.
        name = model if model == SMOLLM2 or cost.name not in SHAPES else cost.name
        is_gguf = model.lower().endswith(".gguf")  # which is dequantized while it is read
        cost = replace(cost, name=name, comes_quantized=cost.comes_quantized or is_gguf)
        plans = make_plans(cost, tokens or min(DEFAULT_CONTEXT, cost.max_context), machine)
        if measure and cost.held_bits is not None:
            raise UsageError("--measure has random weights, which no other library quantizes: drop it.")
        if measure:
            plans = measured_plans(config, cost, plans, lambda each: note(notes, f"measuring {plan_name(each)}"))
        report = Report(cost, machine, plans, is_default_context=tokens is None, dtype=dtype)
        if as_json:
            report.print_json(out)
        else:
            report.print(out)
        if not report.chosen:
            raise typer.Exit(1)


def _parse_memory(size: str) -> int:
    num_bytes = parse_bytes(size)
    if 0 < num_bytes < 2**20:
        meant = f" Write {size.strip()}GiB if these are gibibytes." if size.strip().isdigit() else ""
        raise ValueError(f"{size} is {num_bytes:,} bytes, which is less than 1MiB.{meant}")
    return num_bytes
