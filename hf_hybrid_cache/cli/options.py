"""Options that several subcommands have."""

from typing import Annotated

import typer

from .choices import DTYPES, NAMED_MODELS

Model = Annotated[str, typer.Option(help=f"{', '.join(NAMED_MODELS)}, a model of the Hugging Face Hub, or a folder.")]
Bits = Annotated[
    int | None, typer.Option(help="Bits of each number, 8, 4 or 2; means --cache quantized, whose default is 4.")
]
PrefillChunkSize = Annotated[int, typer.Option(min=1, help="Tokens of the prompt per forward pass.")]
DType = Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}. Default: the model's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... Default: an accelerator if any.")]
