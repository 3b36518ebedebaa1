"""The command and its subcommands, which import heavy libraries only when they run."""

import os
import shutil
import sys
from typing import Annotated

import typer

from .. import __version__
from .arguments import Command
from .batch import batch
from .chat import chat
from .generate import generate
from .plan import plan
from .serve import serve
from .store import store

# Without a wide terminal plain lines: boxes would cut the names of options.
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() and shutil.get_terminal_size().columns >= 100 else None,
    context_settings={"max_content_width": 160},
)


def run() -> None:
    """Run the subcommand that the arguments of the process name."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal cannot show
    try:
        app()
    except OSError as error:  # such as a full disk
        what = f"{error.strerror or error}" + ("" if error.filename is None else f": {error.filename}")
        print(f"error: {what}.", file=sys.stderr)
        # What the stream still holds would be an error again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV caches for Hugging Face transformers that keep long contexts in host memory."""


for command in (generate, chat, batch, serve, store, plan):
    app.command(cls=Command)(command)
