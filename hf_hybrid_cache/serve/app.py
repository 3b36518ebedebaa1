"""The routes of the server, by Starlette and uvicorn; all computation is on one thread beside their loop."""

import asyncio
import contextlib
import hmac
import json
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..chat import AnswerSettings
from .engine import Answered, Engine
from .protocol import APIError, ChatRequest, Form, TextRequest, parsed

# Of a request's body.
_MOST_BYTES = 2**26
# Seconds without a piece after which a client is told that none has come yet.
_SILENCE = 5.0

# What comes of a request: text, or `None` where none has come for a while; then the end.
_Pieces = AsyncGenerator[str | Answered | None, None]


class Server(uvicorn.Server):
    """
    Answers requests, in their order, until SIGINT or SIGTERM, which end them with an error; a second one ends at once.

    Args:
        engine: answers.
        name: of the model, as clients are told.
        settings: of answers, for what a request does not say.
        api_key: that clients have to send; `None` for no key.
        waiting: requests that may wait for their turn.

    Attributes:
        signal: that ended it; `None` before.
    """

    def __init__(self, engine: Engine, name: str, settings: AnswerSettings, api_key: str | None, waiting: int):
        self._engine, self._name, self._settings, self._api_key = engine, name, settings, api_key
        self._worker, self._begun = ThreadPoolExecutor(1, "requests"), int(time.time())
        self._most_requests, self._requests = 1 + waiting, set[asyncio.Future[None]]()
        self.signal: int | None = None
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ],
            exception_handlers=dict.fromkeys((APIError, HTTPException, Exception), _told),
        )
        # What fails in a handler is printed by `_as_told`, with an id, and not by uvicorn as well.
        super().__init__(uvicorn.Config(app, log_level="critical", lifespan="off"))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.signal, self.should_exit = sig, True

    async def _health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok", "requests": len(self._requests)})

    async def _models(self, request: HTTPRequest) -> Response:
        self._require_key(request)
        model = {"id": self._name, "object": "model", "created": self._begun, "owned_by": "hf-hybrid-cache"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: HTTPRequest) -> Response:
        return await self._answer(request, parsed(ChatRequest, await self._body(request)))

    async def _complete(self, request: HTTPRequest) -> Response:
        return await self._answer(request, parsed(TextRequest, await self._body(request)))

    def _require_key(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self._api_key is None:
            if "origin" in request.headers:  # which browsers send
                raise APIError(403, "A web page may ask only a server with a key: start it with --api-key.", "no_key")
        elif not hmac.compare_digest(given, self._api_key.encode()):
            raise APIError(401, "Send the key of this server: Authorization: Bearer KEY.", "invalid_api_key")

    async def _body(self, request: HTTPRequest) -> bytes:
        """Return the body of a request that has the key."""
        self._require_key(request)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise APIError(413, f"The body has more than {_MOST_BYTES:,} bytes.")
        return bytes(body)

    async def _answer(self, request: HTTPRequest, asked: ChatRequest | TextRequest) -> Response:
        if asked.model not in ("", self._name):
            message = f"There is no model {asked.model!r}: this server has {self._name!r}."
            raise APIError(404, message, "model_not_found", "model")
        form, pieces = Form(self._name, isinstance(asked, ChatRequest)), self._pieces(request, asked)
        if asked.stream:
            # A prompt that is refused at once has a status, and not an event.
            events = _events(pieces, await anext(pieces), form, asked.stream_options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        *texts, end = [piece async for piece in pieces if piece is not None]
        assert isinstance(end, Answered)
        return JSONResponse(form.whole("".join(map(str, texts)), *end))

    async def _pieces(self, request: HTTPRequest, asked: ChatRequest | TextRequest) -> _Pieces:
        """Yield what comes of a request in its turn; closing the generator ends it within a step."""
        settings, loop = asked.settings(self._settings), asyncio.get_running_loop()
        queue, is_left = asyncio.Queue[str | Answered | Exception](), threading.Event()
        if len(self._requests) >= self._most_requests:
            message = f"{len(self._requests)} requests are answered or wait already. Ask again later."
            raise APIError(429, message, "queue_full")

        def put(piece: str | Answered | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        def require_wanted() -> None:
            if self.should_exit:
                raise APIError(503, "The server is stopping.", "stopping")
            if is_left.is_set():
                raise ClientDisconnect

        def compute() -> None:
            try:
                for piece in self._engine.answer(asked.prompt, settings, require_wanted):
                    put(piece)
            except Exception as error:
                put(error)

        async def until_left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(ClientDisconnect())

        future, watch = loop.run_in_executor(self._worker, compute), asyncio.create_task(until_left())
        self._requests.add(future)
        future.add_done_callback(self._requests.discard)
        piece: Any = None
        try:
            while not isinstance(piece, Answered):
                piece = None
                with contextlib.suppress(TimeoutError):
                    piece = await asyncio.wait_for(queue.get(), _SILENCE)
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            is_left.set()
            watch.cancel()
            future.cancel()  # if it waits still


async def _events(pieces: _Pieces, piece: str | Answered | None, form: Form, has_usage: bool) -> AsyncIterator[str]:
    """Yield an answer as server-sent events, from a first piece on."""
    is_first = True
    try:
        while not isinstance(piece, Answered):
            yield ": the prompt is read\n\n" if piece is None else _event(form.piece(piece, is_first))
            is_first = is_first and piece is None
            piece = await anext(pieces)
        yield _event(form.piece("", is_first, piece.answer))
        if has_usage:
            yield _event(form.usage(*piece))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(_as_told(error).body())
    finally:
        await pieces.aclose()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _as_told(error: Exception) -> APIError:
    """Return an error as clients are told of it; one that nobody expected is printed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{error.detail}.")
    if isinstance(error, ClientDisconnect):
        return APIError(499, "The client has left.")
    identifier = uuid.uuid4().hex[:12]
    print(f"error {identifier}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    return APIError(500, f"An error inside the server, which its output tells as {identifier}.", "internal_error")


async def _told(request: HTTPRequest, error: Exception) -> Response:
    told = _as_told(error)
    return JSONResponse(told.body(), told.status, told.headers)
