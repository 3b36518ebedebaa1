"""`hf-hybrid-cache serve`: answers to clients of OpenAI's API, from documents that are read once."""

import contextlib
import shutil
import signal
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ..scalars import parse_bytes
from .console import UsageError, consoles, exit_codes, note, write
from .options import AnswerOptions, Cache, Model, Quiet, Store, option, parsed, with_options

SERVER = "Server"
# Requests at once: rows of a pass.
MOST_PARALLEL = 8
# Of what is free on its disk, the share of a store that goes with the server.
_SHARE = 4


@with_options
def serve(
    model: Model,
    cache: Cache,
    answer: AnswerOptions,
    store: Store,
    host: Annotated[str, option(SERVER, "Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, option(SERVER, "Port to listen at; 0 for one that is free.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        option(SERVER, "Key that clients have to send. Default: none.", envvar="HF_HYBRID_CACHE_API_KEY"),
    ] = None,
    origin: Annotated[
        list[str] | None,
        option(
            SERVER,
            "Origin of web pages that may ask, such as https://example.org; may be repeated, and * is any, with a key. "
            "Default: none.",
            metavar="URL",
        ),
    ] = None,
    lenient: Annotated[
        bool,
        option(
            SERVER, "Ignore fields of requests that are not supported, and say so, instead of refusing.", "--lenient"
        ),
    ] = False,
    memory: Annotated[
        str | None,
        option(
            SERVER,
            "Size of the conversations in memory, such as 8GiB; those used longest ago go first. Default: a quarter of "
            "what is free.",
        ),
    ] = None,
    parallel: Annotated[
        int, option(SERVER, "Requests that are answered at once, in turns.", min=1, max=MOST_PARALLEL)
    ] = 4,
    waiting: Annotated[
        int, option(SERVER, "Requests that may wait until one of those ends; more are refused.", min=0)
    ] = 16,
    quiet: Quiet = False,
) -> None:
    """
    Answer clients of OpenAI's API.

    Documents are read once: what was read before, also by another process with the same --store, is not read again.
    Answer settings hold where a request does not say otherwise. Each request is a line on stderr. Ctrl-C ends.
    """
    out, notes = consoles(quiet)
    with exit_codes(notes), contextlib.ExitStack() as stack:
        cache.require_ours("serve")
        if api_key == "":
            raise UsageError("--api-key is empty: give a key, or drop it.")
        origins = [_origin(each, api_key is not None) for each in origin or ()]
        memory_bytes = parsed("--memory", memory, parse_bytes)
        try:
            from ..serve.app import Server
        except ModuleNotFoundError as error:
            raise UsageError(f'{error.name} is missing: pip install "hf_hybrid_cache[serve]".') from error
        from ..prefix_store import PrefixStore
        from ..serve.engine import Engine
        from .loading import load_model

        say, family = partial(note, notes), socket.AF_INET6 if ":" in host else socket.AF_INET
        prompts = store.open()
        with socket.create_server((host, port), family=family) as listening:
            loaded = load_model(model, cache.name, notes)
            at, port = listening.getsockname()[:2]
            if api_key is None and not (at == "::1" or at.startswith("127.")):
                say(f"WARNING: whoever reaches {host} may ask. Let clients send a key: --api-key.")
            url = f"http://{f'[{at}]' if ':' in at else at}:{port}/v1"
            if prompts is None:
                folder = Path(tempfile.mkdtemp(prefix="hf-hybrid-cache-"))
                stack.callback(_remove, folder)
                prompts = PrefixStore(folder, max_bytes=shutil.disk_usage(folder).free // _SHARE)
            engine = Engine(
                loaded.model,
                loaded.tokenizer,
                prompts,
                memory_bytes=memory_bytes,
                remark=say,
                **cache.arguments,
            )
            server = Server(
                engine,
                model.name,
                answer.settings(),
                host=host,
                api_key=api_key,
                parallel=parallel,
                waiting=waiting,
                origins=origins,
                is_lenient=lenient,
                log=say,
                leave=stack.close,
            )
            write(out, f"{model.name} answers at {url}\n")
            server.run(sockets=[listening])
        if server.signal not in (None, signal.SIGTERM):
            raise typer.Exit(128 + server.signal)


def _origin(text: str, has_key: bool) -> str:
    """The origin that --origin names, as browsers send it; raises `UsageError` for anything else."""
    if text == "*" and not has_key:
        raise UsageError("--origin * lets any web page ask: add --api-key, or name the pages.")
    given = urlsplit(text)
    if text != "*" and (not given.scheme or not given.netloc or given.path.strip("/") or given.query or given.fragment):
        raise UsageError(f"--origin must be a scheme and a host, such as https://example.org, got {text!r}.")
    return text.rstrip("/").lower()


def _remove(folder: Path) -> None:
    """Remove a folder into which a thread may write still; by another name it does not any more."""
    with contextlib.suppress(OSError):
        folder = folder.rename(folder.with_name(f"{folder.name}-going"))
    shutil.rmtree(folder, ignore_errors=True)
