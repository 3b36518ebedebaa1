"""The routes of the server, by Starlette and uvicorn; answers are computed on threads beside their loop."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..chat import AnswerSettings
from .engine import Answered, Engine
from .logprobs import Piece
from .protocol import APIError, ChatRequest, Form, TextRequest, parsed
from .responses import ResponseForm, ResponseRequest

# Bytes of a body for each token of the context, which are many, and for the rest; and of any body.
_TOKEN_BYTES, _OTHER_BYTES, _MOST_BYTES = 64, 2**20, 2**26
# Seconds without a piece after which a client is told that none has come yet.
_SILENCE = 5.0
# A body has so many seconds, and one more for each of so many bytes that have come.
_BODY_SECONDS, _BODY_BYTES = 10.0, 2**14
# Seconds after which a connection ends on which nothing happens.
_IDLE_SECONDS = 10.0
# Connections beside those of requests that are answered or wait.
_CONNECTIONS = 256
# Seconds after which connections are cut when the server ends; answers know of it before.
_LAST_SECONDS = int(_SILENCE) + 1
# Of what a client has sent, characters that it is told.
_LONGEST_NAME = 200
# What ends the server, where the system has it.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]

# What comes of a request: text and calls, or `None` where none has come for a while; then the end.
_Pieces = AsyncGenerator[Piece | Answered | None, None]


class Server(uvicorn.Server):
    """
    Answers requests, some at once, until a signal ends them with an error; a second one ends the process at once.

    Args:
        engine: answers.
        name: of the model, as clients are told.
        settings: of answers, for what a request does not say.
        host: name or address that the server was told to listen at.
        api_key: that clients have to send; `None` for no key.
        parallel: requests that are answered at once.
        waiting: requests that may wait until one of these ends.
        origins: of web pages that may ask; "*" for any.
        is_lenient: whether what a request says of fields that are not supported is left out, and logged.
        log: receives a line for each request.
        leave: is called before the process ends at once.

    Attributes:
        signal: that ended it; `None` before.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        settings: AnswerSettings,
        *,
        host: str,
        api_key: str | None,
        parallel: int,
        waiting: int,
        origins: Sequence[str],
        is_lenient: bool,
        log: Callable[[str], None],
        leave: Callable[[], None],
    ):
        self._engine, self._settings = engine, settings
        self._name = name.encode(errors="replace").decode()  # of a folder, which need not be UTF-8
        self._api_key, self._leave = api_key, leave
        self._hosts = {"localhost", host.lower(), socket.gethostname().lower()}
        self._origins, self._is_lenient, self._log = frozenset(origins), is_lenient, log
        self._workers, self._begun = ThreadPoolExecutor(parallel, "requests"), int(time.time())
        self._most_requests, self._requests = parallel + waiting, set[object]()
        self.signal: int | None = None
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
            ],
            exception_handlers=dict.fromkeys((APIError, HTTPException, Exception), self._told),
        )
        # What fails in a handler is printed by `_as_told`, with an id, and not by uvicorn as well.
        config = uvicorn.Config(
            _cross_origin(app, origins) if origins else app,
            http=_Connection,
            log_level="critical",
            lifespan="off",
            limit_concurrency=self._most_requests + _CONNECTIONS,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until a signal comes, and the step or the chunk of a prompt at hand is done; then one ends at once."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup lets SIGHUP be
                signal.signal(number, self.handle_exit)
        super().run(sockets)
        self._workers.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._leave()
            os._exit(128 + sig)
        self.signal, self.should_exit = sig, True

    async def _health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok", "requests": len(self._requests)})

    async def _models(self, request: HTTPRequest) -> Response:
        self._require_known(request)
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: HTTPRequest) -> Response:
        self._require_known(request)
        self._require_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._begun, "owned_by": "hf-hybrid-cache"}

    def _require_model(self, name: str) -> None:
        if name != self._name:
            message = f"There is no model {name[:_LONGEST_NAME]!r}: this server has {self._name!r}."
            raise APIError(404, message, "model_not_found", "model")

    async def _chat(self, request: HTTPRequest) -> Response:
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: HTTPRequest) -> Response:
        return await self._answer(request, TextRequest)

    async def _respond(self, request: HTTPRequest) -> Response:
        return await self._answer(request, ResponseRequest)

    def _require_known(self, request: HTTPRequest) -> None:
        """Check that a request has the key; without one, that no web page asks, whatever name it has for the server."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self._api_key is None:
            origin = request.headers.get("origin")  # which browsers send
            if origin is not None and origin not in self._origins:
                message = f"This page may not ask: start the server with --origin {origin[:_LONGEST_NAME]}."
                raise APIError(403, message, "no_key")
            if not self._is_own(host := request.headers.get("host", "")):
                message = f"This server is not known as {host[:_LONGEST_NAME]!r}: start it with --api-key, or --host."
                raise APIError(403, message, "no_key")
        elif scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), self._api_key.encode()):
            raise APIError(401, "Send the key of this server: Authorization: Bearer KEY.", "invalid_api_key")

    def _is_own(self, host: str) -> bool:
        """Return whether a host is an address, or a name that this machine has and nobody else gives it."""
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ipaddress.ip_address(name))
        return False

    async def _body(self, request: HTTPRequest) -> bytes:
        """Return the body of a request, which has a limit, and comes without long pauses."""
        most = min(_MOST_BYTES, _OTHER_BYTES + _TOKEN_BYTES * self._engine.context)
        begin, body = asyncio.get_running_loop().time(), bytearray()
        too_large = APIError(413, f"The body has more than {most:,} bytes: the model's context has no room for it.")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_SECONDS) as limit:
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
                    limit.reschedule(begin + _BODY_SECONDS + len(body) / _BODY_BYTES)
        except TimeoutError as error:
            raise APIError(408, f"The body does not come: {len(body):,} bytes of it are here.") from error
        return bytes(body)

    async def _answer(self, request: HTTPRequest, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        self._require_known(request)
        with contextlib.ExitStack() as place:
            self._take(place)
            # Beside the loop, which others wait for.
            asked, ignored = await asyncio.to_thread(parsed, kind, await self._body(request), self._is_lenient)
            if isinstance(asked, ChatRequest) and asked.tools and not self._engine.takes_tools:
                ignored += asked.without_tools(self._is_lenient)
            if ignored:
                self._log(f"{_clock()} ignored: {', '.join(ignored)[:_LONGEST_NAME]}")
            if asked.model:
                self._require_model(asked.model)
            settings = await asyncio.to_thread(asked.settings, self._settings)
            form = self._form(asked)
            pieces = self._pieces(request, asked, settings, place.pop_all())
        if asked.stream:
            # A prompt that is refused at once has a status, and not an event.
            told = partial(self._as_told, request)
            events = _events(pieces, await anext(pieces), form, told)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        whole: list[Piece] = []
        async for piece in pieces:
            if isinstance(piece, Answered):
                end = piece
            elif piece is not None:
                whole.append(piece)
        return JSONResponse(form.whole(whole, *end))

    def _form(self, asked: ChatRequest | TextRequest) -> Form | ResponseForm:
        if isinstance(asked, ResponseRequest):
            return ResponseForm(self._name, asked)
        return Form(self._name, isinstance(asked, ChatRequest), asked.stream_options.include_usage)

    def _take(self, place: contextlib.ExitStack) -> None:
        """Take a place among the requests, before anything of one is read, until `place` is closed."""
        if len(self._requests) >= self._most_requests:
            message = f"{len(self._requests)} requests are answered or wait already. Ask again later."
            raise APIError(429, message, "queue_full")
        self._requests.add(place)
        place.callback(self._requests.discard, place)

    async def _pieces(
        self,
        request: HTTPRequest,
        asked: ChatRequest | TextRequest,
        settings: AnswerSettings,
        place: contextlib.ExitStack,
    ) -> _Pieces:
        """Yield what comes of a request in its turn; closing the generator ends it, and its place, within a step."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Piece | Answered | Exception]()
        is_left, begun = threading.Event(), time.perf_counter()

        def in_loop(act: Callable[..., object], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(act, *args)

        put = partial(in_loop, queue.put_nowait)

        def require_wanted() -> None:
            self._require_going_on()
            if is_left.is_set():
                raise ClientDisconnect

        def compute() -> None:
            try:
                for piece in self._engine.answer(asked.prompt, settings, require_wanted, asked.n, asked.top_logprobs):
                    put(piece)
            except Exception as error:
                put(error)

        async def until_left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(ClientDisconnect())

        future, watch = self._workers.submit(compute), asyncio.create_task(until_left())
        future.add_done_callback(lambda _: in_loop(place.close))  # once it has ended, whoever has left before
        piece: Any = None
        try:
            while not isinstance(piece, Answered):
                piece = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SILENCE):
                        piece = await queue.get()
                if piece is None:
                    self._require_going_on()
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, Answered):
                    place.close()  # its client may ask again while it is stored
                    self._log(f"{_clock()} {request.url.path} 200: {_cost(piece, time.perf_counter() - begun)}")
                yield piece
        finally:
            is_left.set()
            watch.cancel()
            future.cancel()  # if it waits still

    def _require_going_on(self) -> None:
        if self.should_exit:
            raise APIError(503, "The server is stopping.", "stopping")

    async def _told(self, request: HTTPRequest, error: Exception) -> Response:
        told = self._as_told(request, error)
        return JSONResponse(told.body(), told.status, told.headers)

    def _as_told(self, request: HTTPRequest, error: Exception) -> APIError:
        """Return an error as the client of a request is told of it, and log it."""
        told = _as_told(error)
        self._log(f"{_clock()} {request.url.path[:_LONGEST_NAME]} {told.status}: {told}")
        return told


class _Connection(H11Protocol):
    """
    A connection that ends after a while without a whole head of a request, or whose client takes no answer.

    Where there are as many as may be, a new one ends that which has been without a request for longest.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        ours = [each for each in self.connections if isinstance(each, _Connection) and not each.transport.is_closing()]
        idle = [each for each in ours if each._is_idle and each is not self]
        if idle and len(ours) >= (self.limit_concurrency or math.inf):
            min(idle, key=lambda each: each._idle_since).transport.abort()
        self._look(None)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self, before: object) -> None:
        """End the connection if nothing has happened since the last look, where something should."""
        is_idle, unsent = self._is_idle, self.transport.get_write_buffer_size()
        now = is_idle, self.cycle, unsent
        if now == before and (is_idle or unsent):
            self.transport.abort()
        elif self in self.connections:
            self.loop.call_later(_IDLE_SECONDS, self._look, now)


def _cross_origin(app: Starlette, origins: Sequence[str]) -> CORSMiddleware:
    """Let pages of these origins see all answers, errors too, and browsers ask, without a key, if they may send one."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["Retry-After"],
    )


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _cost(end: Answered, seconds: float) -> str:
    before, made = end.answers[0].prompt_tokens, sum(len(each.token_ids) for each in end.answers)
    return f"{before:,} tokens, {end.cached_tokens:,} of them cached, {made:,} generated, {seconds:.2f} s"


async def _events(
    pieces: _Pieces,
    piece: Piece | Answered | None,
    form: Form | ResponseForm,
    told: Callable[[Exception], APIError],
) -> AsyncIterator[str]:
    """Yield answers as server-sent events, from a first piece on."""
    try:
        while not isinstance(piece, Answered):
            if piece is None:
                yield ": the prompt is read\n\n"
            else:
                for event in form.events(piece):
                    yield _event(event)
            piece = await anext(pieces)
        for event in form.last(*piece):
            yield _event(event)
        yield form.end
    except Exception as error:
        yield _event(told(error).body())
    finally:
        await pieces.aclose()


def _event(value: dict[str, Any]) -> str:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"


def _as_told(error: Exception) -> APIError:
    """Return an error as clients are told of it; one that nobody expected is printed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        what = "Nothing is here: this server has OpenAI's API, such as /v1/chat/completions"
        return APIError(error.status_code, f"{what if error.status_code == 404 else error.detail}.")
    if isinstance(error, ClientDisconnect):
        return APIError(499, "The client has left.")
    identifier = uuid.uuid4().hex[:12]
    print(f"error {identifier}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    return APIError(500, f"An error inside the server, which its output tells as {identifier}.", "internal_error")
